"""config.json to ModelConfig and back, and what is refused."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from megajax.checkpoint.hf.families import FAMILIES, family_for, family_of
from megajax.checkpoint.hf.settings import Settings
from megajax.config import ConfigError, ModelConfig
from tests.checkpoint.hf.made import GROUPED, MODELS, T5

POOLER = ("pooler.dense.weight",)


def read(model_type: str, settings: dict[str, Any]) -> ModelConfig:
    """The model that some settings describe."""
    return FAMILIES[model_type].read(Settings(settings, POOLER if MODELS[model_type].pair_task else ()))


@pytest.mark.parametrize("model_type", FAMILIES)
def test_settings_come_back(model_type: str) -> None:
    """What is written says the same when it is read, and says it in the same words."""
    family, model = FAMILIES[model_type], MODELS[model_type]
    settings = family.write(model)
    assert family.write(read(model_type, settings)) == settings
    assert family_for(model) is family_for(read(model_type, settings)) is family


def test_t5_1_1_comes_back() -> None:
    model = ModelConfig(**T5 | {"activation": "geglu"})
    assert FAMILIES["t5"].read(Settings(FAMILIES["t5"].write(model))) == replace(model, encoder_layers=2)


def test_old_and_new_words_for_the_rotary_embedding() -> None:
    """transformers 5 says `rope_parameters` for what were `rope_theta` and `rope_scaling`."""
    settings = FAMILIES["llama"].write(MODELS["llama"])
    base, scaling = settings.pop("rope_theta"), settings.pop("rope_scaling")
    old = read("llama", settings | {"rope_theta": base, "rope_scaling": scaling})
    new = read("llama", settings | {"rope_parameters": {"rope_theta": base, **scaling}})
    assert old == new and new.rope_base == 5e5 and new.rope_scaling_factor == 8
    assert read("llama", settings).rope_base == 10_000


@pytest.mark.parametrize(("given", "kv_heads"), [(4, 4), (None, 4), (2, 2), (1, 1)])
def test_key_value_heads(given: int | None, kv_heads: int) -> None:
    """Case F08: not said, or said to be null, they are as many as the query heads."""
    settings = FAMILIES["llama"].write(MODELS["llama"]) | {"num_key_value_heads": given}
    assert read("llama", settings).kv_heads == kv_heads
    if given is None:
        del settings["num_key_value_heads"]
        assert read("llama", settings).kv_heads == kv_heads


def test_roberta_counts_positions_behind_padding() -> None:
    """514 rows are 512 positions and two rows before them."""
    settings = FAMILIES["roberta"].write(MODELS["roberta"]) | {"max_position_embeddings": 514, "pad_token_id": 1}
    model = read("roberta", settings)
    assert (model.max_positions, model.position_offset) == (512, 2)


@pytest.mark.parametrize(
    ("changes", "window"),
    [
        ({"use_sliding_window": False, "sliding_window": 8}, None),
        ({"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 0}, 8),
        ({"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 2}, None),
        ({"use_sliding_window": True, "sliding_window": 8, "layer_types": ["sliding_attention"] * 2}, 8),
    ],
)
def test_windows_of_all_layers_or_none(changes: dict[str, Any], window: int | None) -> None:
    assert read("qwen2", FAMILIES["qwen2"].write(MODELS["qwen2"]) | changes).window == window


@pytest.mark.parametrize(
    ("model_type", "changes", "said"),
    [
        ("gpt2", {"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx is True"),
        ("gpt2", {"activation_function": "silu"}, "activation_function is silu, which megajax lacks: it has gelu"),
        ("llama", {"hidden_act": "gelu"}, "hidden_act is gelu, which megajax lacks: it has silu"),
        ("llama", {"mlp_bias": True}, "mlp_bias is True"),
        ("llama", {"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "rope_scaling is .* default and llama3"),
        ("llama", {"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5"),
        ("llama", {"rms_norm_eps": None}, "config.json lacks rms_norm_eps"),
        ("qwen2", {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}, "max_window_layers is 1"),
        ("qwen3", {"attention_bias": True}, "attention_bias is True"),
        ("qwen3_moe", {"mlp_only_layers": [0]}, r"mlp_only_layers is \[0\]"),
        ("bloom", {"apply_residual_connection_post_layernorm": True}, "apply_residual_connection_post_layernorm"),
        ("bert", {"position_embedding_type": "relative_key"}, "position_embedding_type is relative_key"),
        ("t5", {"feed_forward_proj": "gated-relu"}, "feed_forward_proj is gated-relu"),
    ],
)
def test_what_has_no_counterpart_is_refused_by_its_key(model_type: str, changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        read(model_type, FAMILIES[model_type].write(MODELS[model_type]) | changes)


def test_other_families_are_refused() -> None:
    with pytest.raises(ConfigError, match="model_type is opt, which megajax lacks: it has gpt2, llama"):
        family_of({"model_type": "opt"})


def test_a_model_that_no_family_has() -> None:
    """The nearest family is named with what it cannot say."""
    model = ModelConfig(**GROUPED | {"activation": "geglu"})
    with pytest.raises(
        ConfigError,
        match=r"has this model: llama, the nearest, lacks model\.activation=geglu",
    ):
        family_for(model)
