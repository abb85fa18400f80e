"""The activations, tested in an MLP of width one whose weights are small whole numbers."""

import jax.numpy as jnp
import numpy as np
import pytest

from megajax.config.model import ModelConfig
from megajax.models.context import Context
from megajax.models.feed_forward import Mlp
from megajax.models.layout import Layout
from tests.models import reference
from tests.models.tiny import filled


def narrow_mlp(activation):
    config = ModelConfig(num_layers=1, hidden_size=1, num_heads=1, ffn_hidden_size=1, activation=activation, bias=False)
    return filled(lambda key: Mlp(key, config), np.ones)


def run(mlp, *x):
    y, losses = mlp(jnp.array(x)[None, :, None], Context(Layout()))
    assert losses == {}
    return y[0, :, 0]


def test_gelu_is_the_tanh_form():
    """0.841192 at 1; the exact GELU, through the error function, is 0.841345."""
    np.testing.assert_allclose(run(narrow_mlp("gelu"), 1.0, -1.0, 3.0), [0.841192, -0.158808, 2.996363], atol=1e-6)


def test_swiglu_gates_with_the_first_matrix():
    """SiLU(x) times 2 x; the other way round, SiLU(2 x) times x, is 1.761594 at 1."""
    mlp = narrow_mlp("swiglu")
    mlp.fc1[...] = jnp.array([[[1.0], [2.0]]])
    np.testing.assert_allclose(run(mlp, 1.0, -1.0), [1.462117, 0.537883], atol=1e-6)


@pytest.mark.parametrize("activation", ["gelu", "gelu_exact", "relu", "squared_relu", "swiglu", "geglu"])
def test_matches_numpy(activation):
    config = ModelConfig(hidden_size=6, num_heads=2, ffn_hidden_size=10, activation=activation)
    rng = np.random.default_rng(0)
    mlp = filled(lambda key: Mlp(key, config), lambda shape: rng.normal(size=shape))
    x = rng.normal(size=(1, 5, 6))

    y, _ = mlp(jnp.float32(x), Context(Layout()))

    weights = {f"mlp.{name}": np.float64(getattr(mlp, name)[...]) for name in ("fc1", "fc1_bias", "fc2", "fc2_bias")}
    np.testing.assert_allclose(y[0], reference.mlp(x[0], weights, activation), rtol=1e-5, atol=1e-4)
