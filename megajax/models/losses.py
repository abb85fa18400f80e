"""Objective of training: a sum of a few named terms with factors, and the head's cross-entropy.

The LM head and its cross-entropy are one operator, which never holds the logits of more than one chunk of tokens. The
gradient of a softmax cross-entropy has a closed form (softmax minus one-hot). So the forward pass computes dx, dW and
db chunk by chunk, and the backward pass only scales them: no logits are kept and none are recomputed.

Shapes: B batch, S sequence, T = B S tokens, C tokens of a chunk, D embed, V vocabulary rows of this shard.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from megajax.config.model import ModelConfig
from megajax.models.layers import capped

Losses = dict[str, jax.Array]
"""Terms of the loss by Megatron-LM's names in logs, each a weighted sum, fp32 scalar."""

BESIDES = ("sop loss", "load_balancing_loss", "z_loss")
"""Names of the terms that a model may have besides "lm loss"."""


def coefficients(config: ModelConfig) -> dict[str, float]:
    """Return the factor of every term that a model may have."""
    return {"lm loss": 1.0, "sop loss": 1.0, "load_balancing_loss": config.balance_loss, "z_loss": config.z_loss}


def add(a: Losses, b: Losses) -> Losses:
    """Add up two sets of terms; a missing term counts as 0."""
    return {name: a.get(name, 0) + jnp.asarray(b.get(name, 0)) for name in {**a, **b}}


def objective(losses: Losses, config: ModelConfig) -> jax.Array:
    """Return the objective, whose gradient is taken: the sum of factor x term."""
    factors = coefficients(config)
    return sum((factors[name] * loss for name, loss in losses.items()), start=jnp.float32(0))


CHUNK_LOGITS = 2**25  # number of fp32 logits held at a time: 128 MiB
LossFn = Callable[[jax.Array, jax.Array], tuple[jax.Array, jax.Array, jax.Array]]
"""Type of `token_losses` with all arguments but logits and labels bound."""


class Gradients(NamedTuple):
    """The gradients of the loss of the head."""

    dx: jax.Array
    """Gradient of the hidden states, [B, S, D] or [C, D] as they are."""
    dhead: jax.Array
    """Gradient of the head, [V, D] or [D, V] like the head, fp32."""
    dbias: jax.Array | None
    """Gradient of the head's bias, [V] fp32; None if there is no bias."""


Loss = tuple[jax.Array, Gradients | None]
"""Sum of weight x token loss, scalar fp32, and its gradients if they were asked for."""


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
    bias: jax.Array | None,
    *,
    loss_fn: LossFn,
    with_gradients: bool,
    softcap: float | None = None,
    transposed: bool = False,
) -> Loss:
    """Compute the sum of weighted token losses and, if asked for, its gradients, chunk by chunk of tokens.

    Args:
        x: hidden states, [B, S, D].
        head: output matrix of this shard, [V, D].
        labels: ids of the next tokens, [B, S].
        weights: loss mask times the loss scale, [B, S] fp32.
        bias: bias of the logits, [V], or None.
        loss_fn: `token_losses` with all arguments but logits and labels bound.
        with_gradients: whether to compute the gradients as well.
        softcap: cap of the logits (see `capped`), or None.
        transposed: whether the head and its gradient are [D, V]. A head that is gathered along D, and whose gradient is
            scattered along D, has this layout and would otherwise be copied.
    """
    flat = x.reshape(-1, x.shape[-1])
    tokens, dims = len(flat), "dv" if transposed else "vd"
    chunk = chunk_size(tokens, head.shape[dims.index("v")])
    count = -(-tokens // chunk)
    padding = count * chunk - tokens  # tokens of weight 0 fill the last chunk
    one_chunk = partial(_chunk_loss, head, bias, dims, loss_fn, softcap, with_gradients)

    def chunked(a: jax.Array) -> jax.Array:
        return jnp.pad(a, [(0, padding)] + [(0, 0)] * (a.ndim - 1)).reshape(count, chunk, *a.shape[1:])

    def add_chunk(sums: Any, inputs: tuple[jax.Array, ...]) -> tuple[Any, Any]:
        loss, gradients = one_chunk(*inputs)
        if gradients is None:
            return None, (loss, None)
        return jax.tree.map(jnp.add, sums, gradients[1:]), (loss, gradients.dx)

    if count == 1:
        loss, gradients = one_chunk(flat, labels.reshape(-1), weights.reshape(-1))
        return loss, gradients and gradients._replace(dx=gradients.dx.reshape(x.shape))
    # Without this barrier the compiler would create the zeros, which depend on nothing, before the layers run, and hold
    # them until here.
    flat, zero = jax.lax.optimization_barrier((flat, jnp.float32(0)))
    sums = jax.tree.map(lambda a: jnp.full(a.shape, zero), (head, bias) if with_gradients else None)
    inputs = chunked(flat), chunked(labels.reshape(-1)), chunked(weights.reshape(-1))
    sums, (losses, dx) = jax.lax.scan(add_chunk, sums, inputs)
    if not with_gradients:
        return losses.sum(), None
    return losses.sum(), Gradients(dx.reshape(count * chunk, -1)[:tokens].reshape(x.shape), *sums)


def _chunk_loss(
    head: jax.Array,
    bias: jax.Array | None,
    dims: str,
    loss_fn: LossFn,
    softcap: float | None,
    with_gradients: bool,
    x: jax.Array,
    labels: jax.Array,
    weights: jax.Array,
) -> Loss:
    """Compute the loss of one chunk, from x [C, D], labels and weights [C], and a head with the dimensions `dims`."""
    logits = jnp.einsum(f"cd,{dims}->cv", x, head, preferred_element_type=jnp.float32)
    if bias is not None:
        logits += bias
    logits = capped(logits, softcap)
    losses, probabilities, one_hot = loss_fn(logits, labels)
    loss = jnp.sum(jnp.where(weights == 0, 0.0, losses * weights))
    if not with_gradients:
        return loss, None
    dlogits = (probabilities - one_hot) * weights[:, None]
    if softcap is not None:
        dlogits *= 1 - jnp.square(logits / softcap)  # derivative of tanh
    dbias = None if bias is None else dlogits.sum(axis=0)
    dlogits = dlogits.astype(x.dtype)
    dhead = jnp.einsum(f"cv,cd->{dims}", dlogits, x, preferred_element_type=jnp.float32)
    return loss, Gradients(jnp.einsum(f"cv,{dims}->cd", dlogits, head), dhead, dbias)


def differentiated(evaluate: Callable[..., jax.Array], with_gradients: Callable[..., Any]) -> Callable[..., jax.Array]:
    """Return a loss of (x, head, labels, weights, bias) whose forward pass computes the gradients as well.

    Args:
        evaluate: function of these arguments that returns the loss.
        with_gradients: function of the same that returns loss and `Gradients`, which the backward pass only scales.
    """

    @jax.custom_vjp
    def loss(x: Any, head: Any, labels: Any, weights: Any, bias: Any) -> jax.Array:
        return evaluate(x, head, labels, weights, bias)

    def forward(x: Any, head: Any, labels: Any, weights: Any, bias: Any) -> tuple[jax.Array, Gradients]:
        value, gradients = with_gradients(x, head, labels, weights, bias)
        return value, jax.tree.map(lambda g, of: g.astype(of.dtype), gradients, Gradients(x, head, bias))

    def backward(gradients: Gradients, cotangent: jax.Array) -> tuple[Any, ...]:
        dx, dhead, dbias = jax.tree.map(lambda g: (g * cotangent).astype(g.dtype), gradients)
        return dx, dhead, None, None, dbias

    loss.defvjp(forward, backward)
    return loss


def chunk_size(tokens: int, vocab: int) -> int:
    """Return the number of tokens in a chunk; chunks are equal, and as few as CHUNK_LOGITS allows."""
    limit = max(1, CHUNK_LOGITS // vocab)
    chunks = -(-tokens // limit)
    return -(-tokens // chunks)


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

    def run(*arrays: Any, with_gradients: bool) -> Loss:
        loss_fn = partial(token_losses, columns=jnp.arange(head.shape[0]), vocab_size=vocab_size)
        return chunked_loss(*arrays, loss_fn=loss_fn, with_gradients=with_gradients, softcap=softcap)

    loss = differentiated(lambda *args: run(*args, with_gradients=False)[0], partial(run, with_gradients=True))
    return loss(x, head, labels, weights, bias)
