"""The fused LM head and loss, compared with a loss that first computes all logits.

Shapes: B batch, S sequence, T = B S tokens, D embed, V vocabulary rows with padding.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megajax.models import losses
from megajax.models.losses import chunk_size, linear_cross_entropy, token_losses

B, S, D, V, VOCAB = 2, 6, 5, 16, 11


def naive(x, head, labels, weights, bias=None, softcap=None):
    """Sum over tokens of weight x (log of the sum of exponentials - logit of the label), padding left out."""
    logits = jnp.einsum("bsd,vd->bsv", x, head[:VOCAB]) + (0 if bias is None else bias[:VOCAB])
    if softcap is not None:
        logits = softcap * jnp.tanh(logits / softcap)
    target = jnp.take_along_axis(logits, labels[..., None], axis=-1)[..., 0]
    return jnp.sum(weights * (jax.nn.logsumexp(logits, axis=-1) - target))


def inputs():
    """Random, with labels at both ends of the vocabulary and two tokens without weight."""
    rng = np.random.default_rng(0)
    x, head = np.float32(rng.normal(size=(B, S, D))), np.float32(2 * rng.normal(size=(V, D)))
    labels = rng.integers(0, VOCAB, (B, S))
    labels[0, :2] = 0, VOCAB - 1
    weights = np.float32(rng.uniform(0.5, 2, (B, S)))
    weights[1, 4:] = 0
    return x, head, labels, weights


@pytest.fixture(params=[1, 4, B * S], ids=lambda c: f"{c} tokens a chunk")
def chunk(request, monkeypatch):
    monkeypatch.setattr(losses, "CHUNK_LOGITS", request.param * V)
    assert chunk_size(B * S, V) == request.param
    return request.param


def gradients(loss, *args):
    return jax.jit(jax.value_and_grad(loss, argnums=(0, 1)))(*args)


def test_loss_and_gradients(chunk):
    """Three times the loss, so that the cotangent that comes in counts."""
    x, head, labels, weights = inputs()

    loss, (dx, dhead) = gradients(lambda x, w: 3 * linear_cross_entropy(x, w, labels, weights, VOCAB), x, head)

    expected, (expected_dx, expected_dhead) = gradients(lambda x, w: 3 * naive(x, w, labels, weights), x, head)
    without_gradients = jax.jit(lambda x, w: 3 * linear_cross_entropy(x, w, labels, weights, VOCAB))(x, head)
    np.testing.assert_allclose([loss, without_gradients], [expected, expected], rtol=2e-6)
    np.testing.assert_allclose(dx, expected_dx, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(dhead, expected_dhead, rtol=1e-5, atol=1e-5)
    assert not dx[1, 4:].any(), "tokens without weight"
    assert not dhead[VOCAB:].any(), "padding"


@pytest.mark.parametrize("softcap", [None, 4.0])
def test_head_with_a_bias(chunk, softcap):
    """One that goes from -5 to 5, so that it decides between ids; its padding has no gradient. Logits reach 15, so that
    a cap of 4 counts.
    """
    x, head, labels, weights = inputs()
    bias = np.linspace(-5, 5, V, dtype=np.float32)

    def gradients(loss):
        return jax.jit(jax.value_and_grad(lambda *args: 3 * loss(*args), argnums=(0, 1, 2)))(x, head, bias)

    loss, got = gradients(lambda x, w, b: linear_cross_entropy(x, w, labels, weights, VOCAB, b, softcap))

    expected, wanted = gradients(lambda x, w, b: naive(x, w, labels, weights, b, softcap))
    np.testing.assert_allclose(loss, expected, rtol=2e-6)
    for a, b in zip(got, wanted, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)
    assert not got[2][VOCAB:].any()


def test_tied_head(chunk):
    """A table that is both embedding and head gets the sum of both gradients."""
    _, table, labels, weights = inputs()
    tokens = np.roll(labels, 1, axis=1)

    def tied(loss):
        return jax.jit(jax.grad(lambda table: loss(table[tokens], table)))(table)

    got = tied(lambda x, head: linear_cross_entropy(x, head, labels, weights, VOCAB))
    np.testing.assert_allclose(got, tied(lambda x, head: naive(x, head, labels, weights)), rtol=1e-5, atol=1e-5)


def test_logits_of_one_chunk_only(monkeypatch):
    """The program has arrays of [chunk, V] logits and none of [T, V]."""
    monkeypatch.setattr(losses, "CHUNK_LOGITS", 4 * V)
    loss = jax.grad(partial(linear_cross_entropy, vocab_size=VOCAB, bias=np.zeros(V)), argnums=(0, 1))
    program = jax.jit(loss).lower(*inputs()).as_text()
    assert f"tensor<4x{V}xf32>" in program
    assert f"tensor<{B * S}x{V}xf32>" not in program


def test_bf16_gradients_are_summed_in_fp32(monkeypatch):
    """A token a chunk: 1 and 256 times 2^-9 are 1.5, where a bf16 sum would stay at 1."""
    monkeypatch.setattr(losses, "CHUNK_LOGITS", 2)
    x, head = np.ones((1, 257, 1), jnp.bfloat16), np.zeros((2, 1), jnp.bfloat16)  # both ids have probability 1/2
    labels, weights = np.zeros((1, 257), np.int32), np.full((1, 257), 2.0**-8, np.float32)
    weights[0, 0] = 2

    _, (dx, dhead) = gradients(lambda x, w: linear_cross_entropy(x, w, labels, weights, 2), x, head)

    assert dx.dtype == dhead.dtype == jnp.bfloat16
    np.testing.assert_array_equal(np.float32(dhead[:, 0]), [-1.5, 1.5])


def test_large_logits_do_not_overflow():
    losses, _, _ = token_losses(jnp.array([[1e4, 0.0, -1e4]]), jnp.array([1]), jnp.arange(3), vocab_size=3)
    np.testing.assert_array_equal(losses, [1e4])


def test_vocabulary_in_four_shards():
    """Each shard holds four columns and three reductions join them; the last shard is padding only."""
    rng = np.random.default_rng(0)
    logits, labels = jnp.float32(3 * rng.normal(size=(6, V))), jnp.array([0, 3, 4, 7, 8, 10])
    whole = token_losses(logits, labels, jnp.arange(V), VOCAB)

    sum_shards, max_shards = (partial(reduce, axis_name="shards") for reduce in (jax.lax.psum, jax.lax.pmax))
    shard = partial(token_losses, vocab_size=VOCAB, psum=sum_shards, pmax=max_shards)
    run = jax.jit(jax.vmap(shard, in_axes=(1, None, 0), out_axes=(0, 1, 1), axis_name="shards"))
    losses, probabilities, one_hot = run(logits.reshape(6, 4, 4), labels, jnp.arange(V).reshape(4, 4))

    for one_shard in losses:
        np.testing.assert_allclose(one_shard, whole[0], rtol=1e-6)
    np.testing.assert_allclose(probabilities.reshape(6, V), whole[1], rtol=1e-6)
    np.testing.assert_array_equal(one_hot.reshape(6, V), whole[2])


@settings(deadline=None)
@given(st.integers(1, 5000), st.integers(1, 2**26))
def test_chunks_are_few_and_even(tokens, vocab):
    """As few chunks as fit, padded by less than a token each; one token where not even one fits."""
    chunk = chunk_size(tokens, vocab)
    limit = max(1, losses.CHUNK_LOGITS // vocab)
    chunks = -(-tokens // chunk)
    assert chunk <= limit
    assert chunks == -(-tokens // limit)
    assert chunks * chunk - tokens < chunks
