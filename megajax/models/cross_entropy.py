"""LM head and cross-entropy in one operator that never holds the logits of more than one chunk of tokens.

The gradient of a softmax cross-entropy is known in closed form (softmax minus one-hot), so the forward pass already
computes dx and dW chunk by chunk and the backward pass only scales them: no logits are kept and none are recomputed.

Shapes: B batch, S sequence, T = B S tokens, C tokens of a chunk, D embed, V vocabulary rows of this shard.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp

CHUNK_LOGITS = 2**25  # fp32 logits alive at a time: 128 MiB


class LinearLoss(NamedTuple):
    """Loss and its gradients."""

    loss: jax.Array
    """Scalar fp32: sum of weight x token loss."""
    dx: jax.Array
    """[T, D]."""
    dhead: jax.Array
    """[V, D] fp32."""


def identity(x: jax.Array) -> jax.Array:
    """The reduction over a vocabulary that is not sharded."""
    return x


def token_losses(
    logits: jax.Array,
    labels: jax.Array,
    columns: jax.Array,
    vocab_size: int,
    psum: Callable[[jax.Array], jax.Array] = identity,
    pmax: Callable[[jax.Array], jax.Array] = identity,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Cross-entropy over a vocabulary of which this shard holds some columns (megatron.md: three reductions of [C]).

    Args:
        logits: [C, V] fp32.
        labels: [C] global ids.
        columns: [V] global id of each column; those >= vocab_size are padding and take no part in the softmax.
        vocab_size: ids that count.
        psum: sum over the shards of the vocabulary.
        pmax: maximum over them.

    Returns:
        losses [C], probabilities [C, V], one-hot labels [C, V] (bool).
    """
    logits = jnp.where(columns < vocab_size, logits, -jnp.inf)
    shifted = logits - pmax(jax.lax.stop_gradient(logits.max(axis=-1)))[:, None]
    one_hot = labels[:, None] == columns
    target = psum(jnp.where(one_hot, shifted, 0.0).sum(axis=-1))
    exp = jnp.exp(shifted)
    total = psum(exp.sum(axis=-1))
    return jnp.log(total) - target, exp / total[:, None], one_hot


def chunked_loss(
    x: jax.Array,
    head: jax.Array,
    labels: jax.Array,
    weights: jax.Array,
    loss_fn: Callable[..., tuple[jax.Array, jax.Array, jax.Array]],
    with_gradients: bool,
) -> LinearLoss:
    """Sum of weighted token losses and, if asked for, its gradients, one chunk of tokens after the other.

    Args:
        x: [T, D] hidden states.
        head: [V, D] output matrix (of this shard).
        labels: [T].
        weights: [T] fp32 loss mask, times the loss scale.
        loss_fn: `token_losses` with everything but logits and labels bound.
        with_gradients: False gives dx and dhead of size zero.
    """
    tokens, chunk = x.shape[0], chunk_size(x.shape[0], head.shape[0])

    def one_chunk(dhead: jax.Array, inputs: tuple[jax.Array, ...]) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
        x, labels, weights = inputs
        logits = jnp.einsum("cd,vd->cv", x, head, preferred_element_type=jnp.float32)
        losses, probabilities, one_hot = loss_fn(logits, labels)
        loss = jnp.sum(jnp.where(weights == 0, 0.0, losses * weights))
        if not with_gradients:
            return dhead, (loss, x[:, :0])
        dlogits = ((probabilities - one_hot) * weights[:, None]).astype(x.dtype)
        dhead += jnp.einsum("cv,cd->vd", dlogits, x, preferred_element_type=jnp.float32)
        return dhead, (loss, jnp.einsum("cv,vd->cd", dlogits, head))

    dhead = jnp.zeros(head.shape if with_gradients else (0, 0), jnp.float32)
    if chunk == tokens:
        dhead, (loss, dx) = one_chunk(dhead, (x, labels, weights))
        return LinearLoss(loss, dx, dhead)
    count = -(-tokens // chunk)
    padding = count * chunk - tokens  # tokens of weight 0 fill up the last chunk

    def chunked(a: jax.Array) -> jax.Array:
        return jnp.pad(a, [(0, padding)] + [(0, 0)] * (a.ndim - 1)).reshape(count, chunk, *a.shape[1:])

    dhead, (losses, dx) = jax.lax.scan(one_chunk, dhead, (chunked(x), chunked(labels), chunked(weights)))
    return LinearLoss(losses.sum(), dx.reshape(count * chunk, -1)[:tokens], dhead)


def chunk_size(tokens: int, vocab: int) -> int:
    """Tokens of a chunk: as few, equal chunks as keep the logits within CHUNK_LOGITS."""
    limit = max(1, CHUNK_LOGITS // vocab)
    chunks = -(-tokens // limit)
    return -(-tokens // chunks)


@partial(jax.custom_vjp, nondiff_argnums=(4,))
def linear_cross_entropy(
    x: jax.Array, head: jax.Array, labels: jax.Array, weights: jax.Array, vocab_size: int
) -> jax.Array:
    """Sum over tokens of weight x cross-entropy of softmax(x head^T), scalar fp32.

    Args:
        x: [B, S, D] output of the final norm.
        head: [V, D] output matrix; rows >= vocab_size are padding.
        labels: [B, S] ids of the next tokens.
        weights: [B, S] fp32 loss mask (times the loss scale under fp16).
        vocab_size: ids that count.
    """
    return _local(x, head, labels, weights, vocab_size, with_gradients=False).loss


def _local(
    x: jax.Array, head: jax.Array, labels: jax.Array, weights: jax.Array, vocab_size: int, with_gradients: bool
) -> LinearLoss:
    loss_fn = partial(token_losses, columns=jnp.arange(head.shape[0]), vocab_size=vocab_size)
    flat = x.reshape(-1, x.shape[-1])
    return chunked_loss(flat, head, labels.reshape(-1), weights.reshape(-1), loss_fn, with_gradients)


def _forward(x, head, labels, weights, vocab_size):  # type: ignore[no-untyped-def]
    out = _local(x, head, labels, weights, vocab_size, with_gradients=True)
    return out.loss, (out.dx.reshape(x.shape), out.dhead.astype(head.dtype))


def _backward(vocab_size, gradients, cotangent):  # type: ignore[no-untyped-def]
    dx, dhead = gradients
    return (dx * cotangent).astype(dx.dtype), (dhead * cotangent).astype(dhead.dtype), None, None


linear_cross_entropy.defvjp(_forward, _backward)
