"""config.json becomes a ModelConfig and returns, or is refused."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megajax.config import InputError, ModelConfig
from megajax.interop.hf.families import FAMILIES, family_for, family_of, updated_settings
from tests.interop.hf.made import GROUPED, MODELS, T5

WINDOW = {"use_sliding_window": True, "sliding_window": 8, "layer_types": None}
POOLER = ("pooler.dense.weight",)


def read(model_type: str, settings: dict[str, Any]) -> ModelConfig:
    """The model that some settings describe."""
    return FAMILIES[model_type].described(settings, POOLER if MODELS[model_type].pair_task else ())


@pytest.mark.parametrize("model_type", FAMILIES)
def test_settings_come_back(model_type: str) -> None:
    """What is written says the same when it is read, and says it in the same words."""
    family, model = FAMILIES[model_type], MODELS[model_type]
    settings = family.write(model)
    assert family.write(read(model_type, settings)) == settings
    assert family_for(model) is family_for(read(model_type, settings)) is family


def test_t5_1_1_comes_back() -> None:
    model = ModelConfig(**T5 | {"activation": "geglu"})
    assert FAMILIES["t5"].described(FAMILIES["t5"].write(model)) == replace(model, encoder_layers=2)


def test_old_and_new_words_for_the_rotary_embedding() -> None:
    """transformers 5 says `rope_parameters` for what were `rope_theta` and `rope_scaling`."""
    settings = FAMILIES["llama"].write(MODELS["llama"])
    base, scaling = settings.pop("rope_theta"), settings.pop("rope_scaling")
    old = read("llama", settings | {"rope_theta": base, "rope_scaling": scaling})
    new = read("llama", settings | {"rope_parameters": {"rope_theta": base, **scaling}})
    assert old == new and new.rope_base == 5e5 and new.rope_scaling_factor == 8
    assert read("llama", settings).rope_base == 10_000


@pytest.mark.parametrize(
    ("changes", "share"),
    [
        ({"partial_rotary_factor": None}, 0.5),
        ({"partial_rotary_factor": 1.0}, 1.0),
        ({"partial_rotary_factor": 1.0, "rope_parameters": {"partial_rotary_factor": 0.5}}, 0.5),
        ({"partial_rotary_factor": 1.0, "rope_parameters": {"rope_theta": 500.0}}, 1.0),
    ],
)
def test_the_share_of_a_head_that_is_rotated(changes: dict[str, Any], share: float) -> None:
    """Half of it unless a file says otherwise, in the newer form before the older one."""
    assert read("nemotron", FAMILIES["nemotron"].write(MODELS["nemotron"]) | changes).rope_fraction == share


@pytest.mark.parametrize(("given", "kv_heads"), [(4, 4), (None, 4), (2, 2), (1, 1)])
def test_key_value_heads(given: int | None, kv_heads: int) -> None:
    """Not said, or said to be null, they are as many as the query heads."""
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
    settings = FAMILIES["qwen2"].write(MODELS["qwen2"])
    del settings["layer_types"]
    assert read("qwen2", settings | changes).window == window


@pytest.mark.parametrize(
    ("types", "pattern", "window"),
    [
        (None, ("local",) * 5 + ("global",), 8),
        (["sliding_attention", "full_attention"] * 4, ("local", "global"), 8),
        (["sliding_attention"] * 8, (), 8),
        (["full_attention"] * 8, (), None),
        (["sliding_attention"] * 7 + ["full_attention"], ("local",) * 7 + ("global",), 8),
    ],
)
def test_the_shortest_pattern_is_read(types: list[str] | None, pattern: tuple[str, ...], window: int | None) -> None:
    """Eight layers of Gemma 3: local ones have the base 10,000, where all are local all do."""
    settings = FAMILIES["gemma3_text"].write(MODELS["gemma3_text"]) | {
        "num_hidden_layers": 8, "layer_types": types, "sliding_window": 8, "rope_theta": 1e6,
        "rope_local_base_freq": 1e4,
    }  # fmt: skip
    model = read("gemma3_text", settings)
    bases = (1e4, None) if pattern == () and window else (1e6, 1e4 if pattern else None)
    assert (model.layer_pattern, model.window, model.rope_base, model.rope_local_base) == (pattern, window, *bases)


@pytest.mark.parametrize(
    ("model_type", "changes", "said"),
    [
        ("gpt2", {"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx is True"),
        ("gpt2", {"activation_function": "silu"}, "activation_function is 'silu', which megajax lacks: it has gelu"),
        ("llama", {"hidden_act": "gelu"}, "hidden_act is 'gelu', which megajax lacks: it has silu"),
        ("llama", {"mlp_bias": True}, "mlp_bias is True"),
        ("llama", {"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "rope_scaling is .* default and llama3"),
        ("llama", {"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5"),
        ("llama", {"rms_norm_eps": None}, "config.json: rms_norm_eps is null, not a number"),
        ("nemotron", {"partial_rotary_factor": 0.75}, "partial_rotary_factor is 0.75, .* an even number of the 4 dims"),
        ("nemotron", {"partial_rotary_factor": 1e308}, "partial_rotary_factor is 1e[+]308"),
        ("nemotron", {"rope_parameters": {"partial_rotary_factor": 0.0}}, "_parameters.partial_rotary_factor is 0"),
        ("nemotron", {"mlp_bias": True}, "mlp_bias is True"),
        ("qwen2", WINDOW | {"max_window_layers": 1}, "max_window_layers is 1"),
        ("qwen2_moe", WINDOW | {"max_window_layers": 1}, "max_window_layers is 1"),
        ("qwen2", {"layer_types": ["sliding_attention"] * 2}, "layer_types is .* it has .*full_attention"),
        ("gpt2", {"hidden_size": 32}, "n_embd is 16 and hidden_size, which means the same, 32"),
        ("gpt2", {"n_head": 3}, r"config.json: n_embd 16 is not a multiple of n_head 3"),
        ("gpt2", {"n_layer": "2"}, "n_layer is '2', not a whole number of 32 bits"),
        ("gpt2", {"layer_norm_epsilon": math.nan}, "layer_norm_epsilon is nan, not a number"),
        ("gpt2", {"is_causal": False}, "is_causal is False"),
        ("llama", {"quantization_config": {"bits": 4}}, "quantization_config, which megajax lacks"),
        ("llama", {"rope_parameters": {"full_attention": {"rope_theta": 1e4}}, "rope_scaling": None}, "full_attention"),
        ("llama", {"rope_scaling": {"rope_type": "llama3"}}, "lacks rope_scaling.factor"),
        ("qwen3", {"attention_bias": True}, "attention_bias is True"),
        ("qwen3_moe", {"mlp_only_layers": [0]}, r"mlp_only_layers is \[0\]"),
        ("gemma2", {"use_bidirectional_attention": True}, "use_bidirectional_attention is True"),
        ("gemma2", {"query_pre_attn_scalar": 0}, "query_pre_attn_scalar is 0"),
        ("gemma2", {"layer_types": ["full_attention"]}, r"layer_types is .* full_attention for each of 2 layers"),
        ("gemma2", {"sliding_window": None}, "lacks sliding_window"),
        ("gemma3_text", {"rope_scaling": {"rope_type": "linear", "factor": 8.0}}, "rope_scaling is .*linear"),
        ("gemma3_text", {"rope_parameters": {"rope_theta": 1e4}}, "it has no rope_theta there"),
        ("gemma3_text", {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping is 50.0"),
        ("gemma3_text", {"sliding_window_pattern": 0, "layer_types": None}, "sliding_window_pattern is 0"),
        ("bloom", {"apply_residual_connection_post_layernorm": True}, "apply_residual_connection_post_layernorm"),
        ("bert", {"position_embedding_type": "relative_key"}, "position_embedding_type is 'relative_key'"),
        ("roberta", {"hidden_act": "relu"}, "hidden_act is 'relu', which megajax lacks: it has gelu"),
        ("t5", {"dense_act_fn": "silu"}, "dense_act_fn is 'silu', which megajax lacks"),
        ("t5", {"feed_forward_proj": "gated-relu"}, "feed_forward_proj is 'gated-relu'"),
    ],
)
def test_what_has_no_counterpart_is_refused_by_its_key(model_type: str, changes: dict[str, Any], said: str) -> None:
    with pytest.raises(InputError, match=said):
        read(model_type, FAMILIES[model_type].write(MODELS[model_type]) | changes)


def test_other_families_are_refused() -> None:
    with pytest.raises(InputError, match="model_type is opt, which megajax lacks: it has gpt2, llama"):
        family_of({"model_type": "opt"})


def test_a_model_that_no_family_has() -> None:
    """The nearest family is named with what it cannot say."""
    model = ModelConfig(**GROUPED | {"activation": "geglu"})
    with pytest.raises(
        InputError,
        match=r"has this model: llama, the nearest, lacks model\.activation=geglu",
    ):
        family_for(model)


CHANGES: dict[str, list[Any]] = {
    "num_kv_heads": [1], "head_dim": [12], "ffn_hidden_size": [40], "max_positions": [64], "vocab_size": [70],
    "positions": ["learned", "rope", "alibi", "relative", "none"], "position_offset": [0, 3], "rope_base": [500.0],
    "rope_fraction": [0.5, 1.0], "rope_scaling_factor": [None, 2.0], "rope_low_frequency": [2.0],
    "rope_high_frequency": [8.0], "rope_original_positions": [64], "relative_buckets": [16],
    "relative_max_distance": [64], "window": [None, 3], "attention_scale": [None, 0.5],
    "norm": ["layernorm", "rmsnorm"], "norm_placement": ["pre", "post"], "embedding_norm": [False, True],
    "norm_eps": [0.01],
    "activation": ["gelu", "gelu_exact", "relu", "swiglu", "geglu"], "bias": [False, True], "qkv_bias": [False, True],
    "qk_norm": [False, True], "tied_head": [False, True], "token_types": [0, 1, 2, 3], "pair_task": [False, True],
    "experts": [0, 8], "experts_per_token": [1], "expert_ffn_size": [20], "shared_ffn_size": [0, 28],
    "shared_gate": [False, True], "router_renormalize": [False, True], "num_layers": [3], "encoder_layers": [3],
    "hidden_size": [32], "num_heads": [8], "layer_pattern": [(), ("global", "local")], "rope_local_base": [None, 300.0],
    "attention_softcap": [None, 5.0], "logit_softcap": [None, 5.0], "norm_plus_one": [False, True],
    "branch_norm": [False, True], "dense_layers": [0, 1], "embedding_scale": [False, True],
}  # fmt: skip
"""Other values of every switch that the outputs of a model depend on."""


@pytest.mark.parametrize("model_type", FAMILIES)
def test_a_changed_model_is_told_or_refused_by_the_name_of_what_changed(model_type: str) -> None:
    """Imported with one set of settings, exported with every switch set otherwise in turn."""
    family, came = FAMILIES[model_type], MODELS[model_type]
    settings, pooler = family.write(came), POOLER if came.pair_task else ()
    before, told = read(model_type, settings), 0
    for name, values in CHANGES.items():
        for value in values:
            try:
                changed = replace(before, **{name: value})
            except InputError:  # there is no such model
                continue
            try:
                now = updated_settings(settings, family, changed, pooler)
            except InputError as error:
                assert f"model.{name}=" in str(error), (name, value)
                continue
            again = family.described(now, pooler)
            same = {other for other in CHANGES if meant(again, other) == meant(changed, other)}
            assert CHANGES.keys() - same <= idle(changed), (name, value)
            told += now != settings
    assert told > 5


def meant(model: ModelConfig, name: str) -> Any:
    """The value of a switch after its default."""
    defaults = {
        "num_kv_heads": model.kv_heads, "head_dim": model.head_size, "ffn_hidden_size": model.ffn_size,
        "expert_ffn_size": model.expert_size, "qkv_bias": model.has_qkv_bias,
        "encoder_layers": model.encoder_layers or model.num_layers,
    }  # fmt: skip
    return defaults.get(name, getattr(model, name))


def idle(model: ModelConfig) -> set[str]:
    """Switches of parts that a model does not have."""
    there = {
        "rope_": model.positions == "rope", "relative_": model.positions == "relative", "expert_": model.experts > 0,
        **dict.fromkeys(("experts_", "dense_", "shared_", "router_"), model.experts > 0),
        "ffn_": model.experts == 0, "position_offset": model.positions == "learned",
        "encoder_": model.family == "t5", "rope_local": bool(model.layer_pattern),
        **dict.fromkeys(("rope_low", "rope_high", "rope_orig"), model.rope_scaling_factor is not None),
    }  # fmt: skip
    return {
        name for name in CHANGES if name.startswith(tuple(start for start, is_there in there.items() if not is_there))
    }


VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-3, 10**30)
    | st.floats()
    | st.sampled_from(["", "2", "gelu", "llama3", "x"]),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.sampled_from(["factor", "rope_type", "a"]), inner),
    max_leaves=3,
)


@given(st.sampled_from(sorted(FAMILIES)), st.data())
def test_whatever_a_file_says_is_a_model_or_one_line(model_type: str, data: st.DataObject) -> None:
    """Null, words for numbers, lists, not a number, negative sizes, in any keys of any family."""
    family = FAMILIES[model_type]
    keys = st.sampled_from([*family.defaults, *family.aliases, "is_causal", "quantization_config"])
    changes = data.draw(st.dictionaries(keys, VALUES, min_size=1, max_size=3))
    try:
        model = read(model_type, family.write(MODELS[model_type]) | changes)
    except InputError as error:
        assert "\n" not in str(error) and str(error).startswith("config.json")
    else:
        assert isinstance(model, ModelConfig)
