"""LM head and cross-entropy in one operator, which never holds the logits of more than one chunk of tokens.

The gradient of a softmax cross-entropy has a closed form (softmax minus one-hot). So the forward pass computes dx, dW
and db chunk by chunk, and the backward pass only scales them: no logits are kept and none are recomputed.

Shapes: B batch, S sequence, T = B S tokens, C tokens of a chunk, D embed, V vocabulary rows of this shard.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp

from megajax.models.activations import capped

CHUNK_LOGITS = 2**25  # number of fp32 logits held at a time: 128 MiB
Sums = tuple[jax.Array, jax.Array | None]
"""Gradients of the head [V, D] (or [D, V]) and its bias [V], fp32."""


class LinearLoss(NamedTuple):
    """Hold the loss of the head and its gradients."""

    loss: jax.Array
    """Sum of weight x token loss, scalar fp32."""
    dx: jax.Array
    """Gradient of the hidden states, [T, D]."""
    dhead: jax.Array
    """Gradient of the head, [V, D] or [D, V] like the head, fp32."""
    dbias: jax.Array | None
    """Gradient of the head's bias, [V] fp32; None if there is no bias."""


def identity(x: jax.Array) -> jax.Array:
    """Return x, as the reduction over a vocabulary that is not sharded."""
    return x


def token_losses(
    logits: jax.Array,
    labels: jax.Array,
    columns: jax.Array,
    vocab_size: int,
    psum: Callable[[jax.Array], jax.Array] = identity,
    pmax: Callable[[jax.Array], jax.Array] = identity,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Compute the cross-entropy over a sharded vocabulary with Megatron-LM's three reductions of [C].

    Args:
        logits: logits of this shard's columns, [C, V] fp32.
        labels: global ids of the labels, [C].
        columns: global id of each column, [V]; ids >= vocab_size are padding, which the softmax excludes.
        vocab_size: number of ids without padding.
        psum: sum over the shards of the vocabulary.
        pmax: maximum over the shards of the vocabulary.

    Returns:
        Losses [C], probabilities [C, V], and one-hot labels [C, V] (bool).
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
    bias: jax.Array | None = None,
    transposed: bool = False,
    softcap: float | None = None,
) -> LinearLoss:
    """Return the sum of weighted token losses and, if asked for, its gradients, chunk by chunk of tokens.

    Args:
        x: hidden states, [T, D].
        head: output matrix of this shard, [V, D].
        labels: ids of the next tokens, [T].
        weights: loss mask times the loss scale, [T] fp32.
        loss_fn: `token_losses` with all arguments but logits and labels bound.
        with_gradients: whether to compute dx, dhead and dbias, which otherwise have size zero.
        bias: bias of the logits, [V], or None.
        transposed: whether the head and its gradient are [D, V]. A head that is gathered along D, and whose gradient is
            scattered along D, has this layout and would otherwise be copied.
        softcap: cap of the logits (see `capped`), or None.
    """
    matrix = "dv" if transposed else "vd"
    tokens, chunk = x.shape[0], chunk_size(x.shape[0], head.shape[matrix.index("v")])

    def one_chunk(sums: Sums, inputs: tuple[jax.Array, ...]) -> tuple[Sums, tuple[jax.Array, jax.Array]]:
        x, labels, weights = inputs
        logits = jnp.einsum(f"cd,{matrix}->cv", x, head, preferred_element_type=jnp.float32)
        if bias is not None:
            logits += bias
        logits = capped(logits, softcap)
        losses, probabilities, one_hot = loss_fn(logits, labels)
        loss = jnp.sum(jnp.where(weights == 0, 0.0, losses * weights))
        if not with_gradients:
            return sums, (loss, x[:, :0])
        dhead, dbias = sums
        dlogits = (probabilities - one_hot) * weights[:, None]
        if softcap is not None:
            dlogits *= 1 - jnp.square(logits / softcap)  # derivative of tanh
        if dbias is not None:
            dbias += dlogits.sum(axis=0)
        dlogits = dlogits.astype(x.dtype)
        dhead += jnp.einsum(f"cv,cd->{matrix}", dlogits, x, preferred_element_type=jnp.float32)
        return (dhead, dbias), (loss, jnp.einsum(f"cv,{matrix}->cd", dlogits, head))

    def sums(start: jax.Array) -> Sums:
        return jax.tree.map(lambda a: jnp.full(a.shape if with_gradients else (0,) * a.ndim, start), (head, bias))

    zero = jnp.float32(0)
    if chunk == tokens:
        (dhead, dbias), (loss, dx) = one_chunk(sums(zero), (x, labels, weights))
        return LinearLoss(loss, dx, dhead, dbias)
    count = -(-tokens // chunk)
    padding = count * chunk - tokens  # tokens of weight 0 fill the last chunk

    def chunked(a: jax.Array) -> jax.Array:
        return jnp.pad(a, [(0, padding)] + [(0, 0)] * (a.ndim - 1)).reshape(count, chunk, *a.shape[1:])

    # The compiler creates zeros that wait for nothing early, before the layers run, and holds them until here.
    x, zero = jax.lax.optimization_barrier((x, zero))
    inputs = (chunked(x), chunked(labels), chunked(weights))
    (dhead, dbias), (losses, dx) = jax.lax.scan(one_chunk, sums(zero), inputs)
    return LinearLoss(losses.sum(), dx.reshape(count * chunk, -1)[:tokens], dhead, dbias)


def chunk_size(tokens: int, vocab: int) -> int:
    """Return the number of tokens in a chunk; chunks are equal, and as few as CHUNK_LOGITS allows."""
    limit = max(1, CHUNK_LOGITS // vocab)
    chunks = -(-tokens // limit)
    return -(-tokens // chunks)


@partial(jax.custom_vjp, nondiff_argnums=(4, 6))
def linear_cross_entropy(
    x: jax.Array,
    head: jax.Array,
    labels: jax.Array,
    weights: jax.Array,
    vocab_size: int,
    bias: jax.Array | None = None,
    softcap: float | None = None,
) -> jax.Array:
    """Return the sum over tokens of weight x cross-entropy of softmax(x head^T + bias), scalar fp32.

    Args:
        x: output of the final norm, [B, S, D].
        head: output matrix, [V, D]; rows >= vocab_size are padding.
        labels: ids of the next tokens, [B, S].
        weights: loss mask, times the loss scale under fp16, [B, S] fp32.
        vocab_size: number of ids without padding.
        bias: bias of the head, [V], or None.
        softcap: cap of the logits (see `capped`), or None.
    """
    return _local(x, head, labels, weights, vocab_size, bias, softcap, with_gradients=False).loss


def _local(
    x: jax.Array,
    head: jax.Array,
    labels: jax.Array,
    weights: jax.Array,
    vocab_size: int,
    bias: jax.Array | None,
    softcap: float | None,
    with_gradients: bool,
) -> LinearLoss:
    loss_fn = partial(token_losses, columns=jnp.arange(head.shape[0]), vocab_size=vocab_size)
    flat = x.reshape(-1, x.shape[-1])
    labels, weights = labels.reshape(-1), weights.reshape(-1)
    return chunked_loss(flat, head, labels, weights, loss_fn, with_gradients, bias, softcap=softcap)


def _forward(x, head, labels, weights, vocab_size, bias, softcap):  # type: ignore[no-untyped-def]
    out = _local(x, head, labels, weights, vocab_size, bias, softcap, with_gradients=True)
    gradients = jax.tree.map(lambda g, weights: g.astype(weights.dtype), (out.dhead, out.dbias), (head, bias))
    return out.loss, (out.dx.reshape(x.shape), *gradients)


def _backward(vocab_size, softcap, gradients, cotangent):  # type: ignore[no-untyped-def]
    dx, dhead, dbias = jax.tree.map(lambda g: (g * cotangent).astype(g.dtype), gradients)
    return dx, dhead, None, None, dbias


linear_cross_entropy.defvjp(_forward, _backward)
