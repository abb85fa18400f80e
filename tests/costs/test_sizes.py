"""The closed form of the number of parameters against the parameters themselves, which are described, never made."""

import math
from dataclasses import replace

import jax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megajax.config import load_config
from megajax.config.base import InputError
from megajax.config.model import ModelConfig
from megajax.config.presets import CONFIGS
from megajax.costs.sizes import parameter_count, parameter_counts
from megajax.models.families import build_model
from megajax.models.parameters import named_leaves

BY_NAME = {
    "word_embedding": "word_embedding",
    "position_embedding": "position_embedding",
    "blocks.attention_norm": "attention_norm",
    "blocks.attention.qkv": "qkv",
    "blocks.attention.q_norm": "qk_norm",
    "blocks.attention.k_norm": "qk_norm",
    "blocks.attention.out": "attention_out",
    "blocks.mlp_norm": "mlp_norm",
    "blocks.mlp.router": "router",
    "blocks.mlp.shared_gate": "shared_gate",
    "blocks.mlp.shared": "shared",
    "blocks.mlp.fc1": "fc1",
    "blocks.mlp.fc2": "fc2",
    "blocks.cross_norm": "cross_norm",
    "blocks.cross": "cross",
    "embedding_norm": "embedding_norm",
    "encoder_norm": "encoder_norm",
    "final_norm": "final_norm",
    "token_type_embedding": "token_type_embedding",
    "transform_norm": "transform_norm",
    "transform": "transform",
    "head_bias": "head_bias",
    "head": "head",
    "pooler": "pooler",
    "pair": "pair_head",
    "encoder_bias": "relative_bias",
    "decoder_bias": "relative_bias",
}
"""Kind of the parameters whose name begins so."""

POST = {"norm_placement": "post", "embedding_norm": True}
T5 = ModelConfig(
    family="t5", num_layers=3, encoder_layers=2, hidden_size=8, num_heads=2, head_dim=3, ffn_hidden_size=5,
    vocab_size=30, positions="relative", relative_buckets=12, norm="rmsnorm", activation="geglu", bias=False,
)  # fmt: skip
BERT = ModelConfig(family="bert", num_layers=2, hidden_size=8, num_heads=2, max_positions=9, vocab_size=30)
OTHERS = {
    "t5": T5,
    "t5 with an own head, equal stacks": replace(T5, tied_head=False, encoder_layers=None),
    "bert": BERT,
    "bert of pairs": replace(BERT, token_types=2, pair_task=True),
    "bert with norms after the sums": replace(BERT, token_types=1, position_offset=2, **POST),
    **{f"preset {path.stem}": load_config(path).config.model for path in CONFIGS.glob("models/*.yaml")},
}

MIXTURE = {
    "bias": st.just(False),
    "experts": st.integers(2, 5),
    "expert_ffn_size": st.none() | st.integers(1, 7),
    "shared_ffn_size": st.integers(1, 7),
    "shared_gate": st.booleans(),
}


@st.composite
def configs(draw: st.DrawFn) -> ModelConfig:
    """Any architecture: all switches, all sizes."""
    kv_heads, group, head_dim = draw(st.integers(1, 3)), draw(st.integers(1, 3)), draw(st.integers(1, 6))
    return draw(
        st.builds(
            ModelConfig,
            num_layers=st.integers(1, 4),
            num_heads=st.just(kv_heads * group),
            num_kv_heads=st.just(kv_heads) if group > 1 else st.none(),
            hidden_size=st.just(kv_heads * group * head_dim),
            head_dim=st.none() | st.integers(1, 6),
            ffn_hidden_size=st.integers(1, 20),
            max_positions=st.integers(1, 9),
            vocab_size=st.integers(1, 300),
            vocab_multiple=st.sampled_from([1, 8, 128]),
            positions=st.sampled_from(["learned", "rope", "none"]),
            norm=st.sampled_from(["layernorm", "rmsnorm"]),
            activation=st.sampled_from(["gelu", "relu", "swiglu", "geglu"]),
            qkv_bias=st.none() | st.booleans(),
            qk_norm=st.booleans(),
            tied_head=st.booleans(),
            embedding_norm=st.booleans(),
            **draw(st.sampled_from([{"bias": st.booleans()}, MIXTURE])),
        )
    )


@settings(max_examples=40, deadline=None)
@given(configs())
def test_counts_what_is_there(config):
    check_counts(config)


@pytest.mark.parametrize("name", OTHERS)
def test_counts_of_other_families_and_presets(name):
    check_counts(OTHERS[name])


def check_counts(config: ModelConfig) -> None:
    """Every kind against the parameters of that kind, and the padding of every table that has some."""
    model = jax.eval_shape(lambda: build_model(jax.random.key(0), config))
    counted, padding = dict.fromkeys(parameter_counts(config), 0), 0
    for name, param in named_leaves(model):
        counted[kind_of(name)] += math.prod(param.shape)
        if param.get_metadata()["axes"][0] == "vocab":
            padding += (config.padded_vocab_size - config.vocab_size) * math.prod(param.shape[1:])

    assert parameter_counts(config, padded=True) == counted
    assert parameter_count(config, padded=True) == sum(counted.values())
    assert parameter_count(config) == sum(counted.values()) - padding


def kind_of(name: str) -> str:
    """What a parameter counts as."""
    if name.startswith("encoder_blocks."):
        return "encoder_" + kind_of(name.removeprefix("encoder_"))
    return next(kind for begin, kind in BY_NAME.items() if name.startswith(begin))


def test_unknown_vocabulary():
    with pytest.raises(InputError, match="vocab_size is not set"):
        parameter_count(ModelConfig())
