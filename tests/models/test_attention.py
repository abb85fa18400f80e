"""Attention, compared with loops in float64, with three properties tested apart: the keys that each query sees, the
key/value head that serves each query, and the precision of the softmax.

Shapes: B batch, S sequence, N heads, K kv heads, H head dim.
"""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from megajax.config.data import DataConfig
from megajax.config.model import ModelConfig
from megajax.data.gpt import make_batch
from megajax.models.attention import Attention
from megajax.models.attention_kernels import Pattern, xla_attention
from megajax.models.context import Context
from megajax.models.layout import Layout
from tests.models import reference
from tests.models.tiny import LLAMA, filled

B, S, N, H = 2, 7, 4, 8


@jax.jit
def attention(q, k, v, segment_ids=None):
    """Causal attention on one device."""
    return Layout().attention(q, k, v, Pattern(), segment_ids, None)


def random_qkv(kv_heads):
    rng = np.random.default_rng(0)
    return (np.float32(rng.normal(size=(B, S, heads, H))) for heads in (N, kv_heads, kv_heads))


@pytest.mark.parametrize("segments", [None, [[0, 0, 0, 1, 1, 2, 2], [0, 1, 1, 1, 1, 1, 2]]], ids=["one", "documents"])
@pytest.mark.parametrize("kv_heads", [4, 2, 1])
def test_matches_loops(kv_heads, segments):
    q, k, v = random_qkv(kv_heads)
    numbers = np.zeros((B, S), np.int32) if segments is None else np.array(segments)

    out = attention(q, k, v, segment_ids=None if segments is None else numbers)

    rows = zip(*(x.astype(np.float64) for x in (q, k, v)), numbers, strict=True)
    np.testing.assert_allclose(out, [reference.attend(*row, ModelConfig()) for row in rows], rtol=1e-5, atol=1e-6)


def test_grouped_queries_share_a_key():
    """2 kv heads for 4 query heads are 4 kv heads of which neighbours are equal."""
    q, k, v = random_qkv(2)
    repeated = attention(q, np.repeat(k, 2, axis=2), np.repeat(v, 2, axis=2))
    np.testing.assert_allclose(attention(q, k, v), repeated, rtol=1e-5, atol=1e-6)


def test_nothing_looks_ahead():
    """A change of key and value t changes outputs from t on, and those before it not by a bit."""
    q, k, v = (jnp.asarray(x) for x in random_qkv(4))
    before = attention(q, k, v)
    for t in range(S):
        after = attention(q, k.at[:, t].add(1), v.at[:, t].multiply(-1))
        np.testing.assert_array_equal(after[:, :t], before[:, :t])
        assert (np.abs(after - before).max(axis=(0, 2, 3))[t:] > 1e-3).all()


def test_documents_do_not_see_each_other():
    """E ends a document; query 4 sees key 4 alone, query 5 keys 4 and 5, query 7 key 7."""
    E = 9
    config = DataConfig(seq_length=8, reset_attention=True)
    batch = make_batch([np.array([5, 6, 7, E, 8, 1, E, 3, 4])], np.array([0]), config, eod=E)

    segments = batch["segment_ids"]
    mask = Pattern().visible(jnp.arange(8), jnp.arange(8), segments, segments)[0]

    seen = [np.flatnonzero(row).tolist() for row in mask]
    assert seen == [[0], [0, 1], [0, 1, 2], [0, 1, 2, 3], [4], [4, 5], [4, 5, 6], [7]]


def test_softmax_is_fp32_under_bf16():
    """Scores 256 and 257: the same number in bf16, which would share the probability evenly."""
    q = [[32, 2, 0, 0], [32, 2, 0, 0]]  # 2 x (16, 1): the 2 undoes 1 / sqrt(H)
    k = [[16, 0, 0, 0], [16, 1, 0, 0]]
    v = [[0, 0, 0, 0], [1, 1, 1, 1]]

    out = attention(*(np.array(x, jnp.bfloat16)[None, :, None] for x in (q, k, v)))

    assert out.dtype == jnp.bfloat16
    np.testing.assert_allclose(np.float32(out[0, 1, 0]), 1 / (1 + np.exp(-1)), rtol=2**-8)


def test_dropout_acts_on_fp32_probabilities():
    """A `drop` that leaves every token with itself alone returns the values."""
    q, k, v = (x.astype(jnp.bfloat16) for x in random_qkv(2))

    def only_itself(probabilities):
        assert probabilities.shape == (B, 2, N // 2, S, S)
        assert probabilities.dtype == jnp.float32
        return jnp.broadcast_to(jnp.eye(S), probabilities.shape)

    out = jax.jit(partial(xla_attention, drop=only_itself))(q, k, v, np.tri(S, dtype=bool)[None])
    np.testing.assert_array_equal(out, np.repeat(v, N // 2, axis=2))


def test_explicit_mask():
    """Decoding gives its own: one query that sees the first three of S cached keys."""
    q, k, v = random_qkv(2)
    mask = (np.arange(S) < 3)[None, None]
    out = jax.jit(xla_attention)(q[:, 2:3], k, v, mask)
    np.testing.assert_allclose(out, attention(q, k, v)[:, 2:3], rtol=1e-5, atol=1e-6)


def test_qk_norm_frees_scores_from_the_input_scale():
    """Queries and keys keep the root mean square 1 of their gain, values grow with the input."""
    config = replace(LLAMA, qk_norm=True)
    rng = np.random.default_rng(0)
    layer = filled(lambda key: Attention(key, config), lambda shape: rng.normal(size=shape))
    layer.q_norm.scale[...] = layer.k_norm.scale[...] = jnp.ones(config.head_size)
    x = jnp.float32(rng.normal(size=(B, S, config.hidden_size)))

    project = jax.jit(lambda layer, x: layer.project(x, Context(Layout())))

    q, k, v = project(layer, x)
    large = project(layer, 100 * x)

    np.testing.assert_allclose(jnp.sqrt(jnp.mean(q**2, axis=-1)), jnp.ones((B, S, N)), rtol=1e-4)
    for got, expected in zip(large, (q, k, 100 * v), strict=True):
        np.testing.assert_allclose(got, expected, rtol=1e-3, atol=1e-3)
