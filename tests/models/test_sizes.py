"""The closed form of the number of parameters against the parameters themselves, which are described, never made."""

import math

import jax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megajax.config.base import ConfigError
from megajax.config.model import ModelConfig
from megajax.models.gpt import Gpt
from megajax.models.parameters import named_leaves
from megajax.models.sizes import parameter_count, parameter_counts

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
    "embedding_norm": "embedding_norm",
    "final_norm": "final_norm",
    "head": "head",
}
"""Kind of the parameters whose name begins so."""


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
    model = jax.eval_shape(lambda: Gpt(jax.random.key(0), config))
    counted = dict.fromkeys(parameter_counts(config), 0)
    for name, param in named_leaves(model):
        kind = next(kind for begin, kind in BY_NAME.items() if name.startswith(begin))
        counted[kind] += math.prod(param.shape)

    assert parameter_counts(config, padded=True) == counted
    assert parameter_count(config, padded=True) == sum(counted.values())
    tables = 1 if config.tied_head else 2
    padding = config.padded_vocab_size - config.vocab_size
    assert parameter_count(config) == sum(counted.values()) - tables * padding * config.hidden_size


def test_unknown_vocabulary():
    with pytest.raises(ConfigError, match="vocab_size is not set"):
        parameter_count(ModelConfig())
