"""LayerNorm and RMSNorm, compared with values by hand and in float64."""

from dataclasses import replace

import jax.numpy as jnp
import numpy as np
import pytest

from megajax.models.layers import Norm
from tests.models import reference
from tests.models.tiny import GPT, LLAMA


def test_layer_norm_by_hand():
    """Mean 2, variance 1; with eps 3 the deviation is sqrt(1 + 3) = 2."""
    x = jnp.array([1.0, 3.0])
    np.testing.assert_allclose(Norm(2, replace(GPT, norm_eps=1e-12))(x), [-1, 1], rtol=1e-6)
    np.testing.assert_allclose(Norm(2, replace(GPT, norm_eps=3.0))(x), [-0.5, 0.5], rtol=1e-6)


def test_rms_norm_by_hand():
    """The mean square of (3, 4) is 12.5; with eps 3.5 the root is 4. Nothing is subtracted and nothing added."""
    x = jnp.array([3.0, 4.0])
    np.testing.assert_allclose(Norm(2, replace(LLAMA, norm_eps=1e-12))(x), [0.8485281, 1.1313708], rtol=1e-6)
    norm = Norm(2, replace(LLAMA, norm_eps=3.5))
    np.testing.assert_allclose(norm(x), [0.75, 1.0], rtol=1e-6)
    assert not hasattr(norm, "bias")


def test_weights_that_start_at_zero():
    """The RMS of (3, 4) is 3.5355339; weights 0 change nothing, weights 0.5 and -1 make it 1.5 and 0 times as large."""
    norm = Norm(2, replace(LLAMA, norm_eps=1e-12, norm_plus_one=True))
    np.testing.assert_array_equal(norm.scale[...], [0, 0])
    np.testing.assert_allclose(norm(jnp.array([3.0, 4.0])), [0.8485281, 1.1313708], rtol=1e-6)
    norm.scale[...] = jnp.array([0.5, -1.0])
    np.testing.assert_allclose(norm(jnp.array([3.0, 4.0])), [1.2727922, 0.0], rtol=1e-6)


@pytest.mark.parametrize("config", [GPT, LLAMA], ids=["layernorm", "rmsnorm"])
def test_bf16_input_is_normalised_in_fp32(config):
    """On an offset of 1000, where neighbouring bf16 numbers are 4 apart, bf16 sums would be off in the first digit."""
    rng = np.random.default_rng(0)
    x = jnp.asarray(1000 + 8 * rng.normal(size=(5, 64)), jnp.bfloat16)
    norm = Norm(64, config)
    scale, bias = rng.normal(size=(2, 64))
    norm.scale[...] = jnp.float32(scale)
    if config is GPT:
        norm.bias[...] = jnp.float32(bias)

    y = norm(x)

    weights = {"norm.scale": scale, "norm.bias": bias if config is GPT else 0}
    expected = reference.norm(np.asarray(x, np.float64), weights, "norm", config)
    assert y.dtype == jnp.bfloat16
    np.testing.assert_allclose(np.asarray(y, np.float64), expected, rtol=2**-8, atol=1e-4)
