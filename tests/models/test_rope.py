"""Rotary embedding: exact angles at far positions, the rotated pairs, and scores that depend only on distances."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megajax.config.model import ModelConfig
from megajax.models.layout import Layout
from megajax.models.parameters import cast
from megajax.models.positions import rope_angles, rotate
from tests.models import reference
from tests.models.tiny import LLAMA, batch_of, random_model

HEAD_128 = ModelConfig(hidden_size=128, num_heads=1, positions="rope")


@partial(jax.jit, static_argnames="config")
def turn(x, positions, config):
    """Rotate x [S, heads, H] at positions [S]."""
    return rotate(x[None], rope_angles(positions[None], config))[0]


def test_angles_at_far_positions():
    """In bf16, 257 would round to 256 and the two positions would coincide."""
    positions = np.array([256, 257, 4095])
    cos, sin = rope_angles(jnp.array([positions]), HEAD_128)

    assert cos.shape == sin.shape == (1, 3, 1, 64)
    np.testing.assert_allclose(cos[0, :2, 0, 0], [-0.03979, 0.81931], atol=1e-5)
    exact = positions[:, None] / 10_000.0 ** (np.arange(64) / 64)
    np.testing.assert_allclose(cos[0, :, 0], np.cos(exact), atol=1e-3)
    np.testing.assert_allclose(sin[0, :, 0], np.sin(exact), atol=1e-3)


def test_a_bf16_model_has_fp32_angles():
    model = cast(random_model(LLAMA), jnp.bfloat16)
    batch = batch_of(np.zeros((1, 2), np.int32), positions=np.array([[256, 257]], np.int32))
    cos, sin = model.context(batch, Layout(), keys=None).kind.angles
    assert cos.dtype == sin.dtype == jnp.float32

    unit = jnp.zeros((1, 2, 1, 4), jnp.bfloat16).at[..., 0].set(1)
    turned = rotate(unit, (cos, sin))
    assert turned.dtype == jnp.bfloat16
    np.testing.assert_allclose(np.float32(turned[0, :, 0, 0]), [-0.03979, 0.81931], rtol=2**-8)


@pytest.mark.parametrize(("fraction", "rotated"), [(1.0, 12), (0.5, 6), (0.2, 2), (0.0, 0)])
def test_rotates_a_share_of_each_head(fraction, rotated):
    """Half-rotate layout: dimension i turns with i + R / 2. A share is rounded down: 0.2 x 12 -> 2."""
    config = replace(HEAD_128, hidden_size=24, num_heads=2, rope_fraction=fraction)
    x = np.random.default_rng(0).normal(size=(3, 2, 12))
    positions = np.array([0, 1, 100])

    y = turn(jnp.float32(x), positions, config)

    np.testing.assert_allclose(y, reference.rotate(x, positions, ModelConfig(), rotated), atol=1e-4)
    np.testing.assert_array_equal(y[0], np.float32(x)[0])
    np.testing.assert_array_equal(y[..., rotated:], np.float32(x)[..., rotated:])


@settings(deadline=None, max_examples=30)
@given(st.integers(0, 2000), st.integers(0, 2000), st.integers(0, 2000), st.integers(0, 99))
def test_scores_see_distances_only(m, n, shift, seed):
    """The product of a query at m and a key at n depends on m - n alone, and rotation keeps lengths."""
    x = jnp.float32(np.random.default_rng(seed).normal(size=(2, 1, 128)))
    q, k = turn(x, np.array([m, n]), HEAD_128)[:, 0]
    far_q, far_k = turn(x, np.array([m + shift, n + shift]), HEAD_128)[:, 0]

    np.testing.assert_allclose(q @ k, far_q @ far_k, atol=0.02)
    np.testing.assert_allclose(jnp.linalg.norm(q), jnp.linalg.norm(x[0]), rtol=1e-5)
