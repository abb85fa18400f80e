"""Maths of a mixture of experts: routing, the experts' MLPs, and the losses of the router.

A router chooses k of E MLPs for every token and weights their outputs (1701.06538; 2401.04088 §2.1). No token is
dropped and no expert is ever full: the T k assignments are queued by expert, and every expert works through its queue
in blocks of R rows, as many as needed. Work follows the load, and memory does not depend on the router's choices:
besides tokens and sums [T, D], forward and backward passes hold one block [R, A, F] and the gradient of one expert.
Blocks are computed again in the backward pass, under every `train.remat`.

`jax.lax.ragged_dot` is not used. Compiled for NVIDIA GPUs (jax 0.10), it multiplies every row by the matrices of every
expert and masks the rows of other experts, which takes E times the work and E copies of the rows.

Shapes: B batch, S sequence, T tokens, D embed, E experts, k experts per token, n experts on this device, A = 2 if
gated, else 1, F mlp, R rows of a block.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp

from megajax.config.model import Activation, ModelConfig
from megajax.models.layers import activate
from megajax.models.losses import Losses

C = TypeVar("C")
TILE = 128
"""Number of rows in a block below which a GPU's matrix units idle."""


class Weights(NamedTuple):
    """The weights of the mixture of one layer."""

    router: Any
    """Router matrix [D, E]."""
    fc1: Any
    """Input matrices [n, D, A, F] of the experts on this device."""
    fc2: Any
    """Output matrices [n, F, D] of the experts on this device."""


AXES = Weights(
    router=("embed", "router"),
    fc1=("experts", "expert_embed", "gate_up", "mlp"),
    fc2=("experts", "mlp", "expert_embed"),
)
"""Logical axes of the weights of a mixture."""


class Routing(NamedTuple):
    """The router's output for every token."""

    logits: jax.Array
    """Router logits [B, S, E], fp32."""
    experts: jax.Array
    """Numbers [B, S, k] of every token's experts, best first, int32."""
    shares: jax.Array
    """Factors [B, S, k] of the experts' outputs, fp32."""


def mixture(
    x: jax.Array, weights: Weights, token_weights: jax.Array | None, config: ModelConfig
) -> tuple[jax.Array, Losses]:
    """Compute the mixture of one layer on one device.

    Args:
        x: normalised input, [B, S, D].
        weights: weights of the router and of all experts.
        token_weights: weights of the tokens in the losses, [B, S] fp32; None for no losses.
        config: configuration of the model, with the choice of experts.

    Returns:
        The output [B, S, D], and the losses of the router.
    """
    routing = route(x, weights.router, config)
    y = apply_experts(x, routing.experts, routing.shares, weights.fc1, weights.fc2, 0, config)
    return y, {} if token_weights is None else router_losses(routing, token_weights)


def route(x: jax.Array, router: jax.Array, config: ModelConfig) -> Routing:
    """Choose the experts of every token by a softmax over all experts, in fp32.

    Renormalised shares are a softmax over the chosen experts alone.
    """
    logits = jnp.matmul(x.astype(jnp.float32), router.astype(jnp.float32), precision=jax.lax.Precision.HIGHEST)
    shares, experts = jax.lax.top_k(jax.nn.softmax(logits), config.experts_per_token)
    if config.router_renormalize:
        shares = shares / shares.sum(axis=-1, keepdims=True)
    return Routing(logits, experts, shares)


def router_losses(
    routing: Routing, token_weights: jax.Array, total: Callable[[jax.Array], jax.Array] = lambda x: x
) -> Losses:
    """Return the terms that these tokens add to the losses of the router; tokens of weight 0 add nothing.

    "load_balancing_loss" of a sequence is E sum_e f_e P_e (2101.03961 eq. 4), where f_e is expert e's share of the
    sequence's assignments, and P_e its mean probability. It is 1 for an undecided router, and up to E / k for one that
    always chooses the same experts. The weight of a sequence is the sum of its tokens' weights. This is Megatron-LM's
    seq_aux_loss. Megatron's default takes f and P over a microbatch, so that the loss depends on the grouping of
    sequences, and therefore on the layout.

    "z_loss" of a token is the square of the logarithm of the softmax's denominator (2202.08906 eq. 5).

    Args:
        routing: routing of this device's tokens.
        token_weights: weights of the tokens in the losses, [B, S] fp32.
        total: function that sums [B, ...] over the devices with other tokens of the same sequences.
    """
    experts, k = routing.logits.shape[-1], routing.experts.shape[-1]
    real = (token_weights != 0).astype(jnp.float32)
    tokens = jnp.maximum(total(real.sum(axis=1)), 1)
    used = jax.nn.one_hot(routing.experts, experts).sum(axis=2)
    share = total(jnp.einsum("bse,bs->be", used, real)) / (k * tokens[:, None])
    probability = jnp.einsum("bse,bs->be", jax.nn.softmax(routing.logits), real) / tokens[:, None]
    sequence_weights = total(token_weights.sum(axis=1))
    return {
        "load_balancing_loss": experts * jnp.einsum("be,be,b->", share, probability, sequence_weights),
        "z_loss": jnp.sum(token_weights * jax.nn.logsumexp(routing.logits, axis=-1) ** 2),
    }


@partial(jax.custom_vjp, nondiff_argnums=(6,))
def apply_experts(
    x: jax.Array,
    experts: jax.Array,
    shares: jax.Array,
    fc1: jax.Array,
    fc2: jax.Array,
    first: jax.Array | int,
    config: ModelConfig,
) -> jax.Array:
    """Return the sum of share x MLP over those of a token's experts that are on this device.

    Args:
        x: normalised input, [B, S, D].
        experts: numbers of a token's experts, all different, [B, S, k].
        shares: factors of their outputs, [B, S, k] fp32.
        fc1: input matrices of experts first, ..., first + n - 1, [n, D, A, F]; F may be a part of their width.
        fc2: output matrices of the same experts, [n, F, D].
        first: number of the first expert on this device.
        config: configuration of the model, with the activation and the number of all experts.

    Returns:
        [B, S, D].
    """
    queues = queue(experts, len(fc1), first)

    def expert(y: jax.Array, inputs: tuple[jax.Array, ...]) -> tuple[jax.Array, None]:
        start, end, fc1, fc2 = inputs

        def block(rows: Rows, y: jax.Array) -> jax.Array:
            out = weighted_mlp(rows.of_tokens(x), rows.of_assignments(shares), fc1, fc2, config.activation)
            return _add(y, rows.tokens, out)

        return in_blocks(block, y, queues.order, start, end, config), None

    y = jnp.zeros((x.size // x.shape[-1], x.shape[-1]), jnp.float32)
    y, _ = jax.lax.scan(expert, y, (queues.starts, queues.ends, fc1, fc2))
    return y.reshape(x.shape).astype(x.dtype)


def _forward(*args: Any) -> tuple[jax.Array, tuple[Any, ...]]:
    return apply_experts(*args), args[:6]


def _backward(config: ModelConfig, saved: tuple[Any, ...], dy: jax.Array) -> tuple[Any, ...]:
    x, experts, shares, fc1, fc2, first = saved
    queues = queue(experts, len(fc1), first)

    def expert(sums: tuple[jax.Array, ...], inputs: tuple[jax.Array, ...]) -> tuple[Any, Any]:
        start, end, *matrices = inputs

        def block(rows: Rows, sums: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
            mlp = partial(weighted_mlp, activation=config.activation)
            _, pull = jax.vjp(mlp, rows.of_tokens(x), rows.of_assignments(shares), *matrices)
            gradients = pull(rows.of_tokens(dy))
            dx, dshares, *dmatrices = sums
            return (
                _add(dx, rows.tokens, gradients[0]),
                _add(dshares, rows.assignments, gradients[1]),
                *(total + gradient for total, gradient in zip(dmatrices, gradients[2:], strict=True)),
            )

        zeros = (jnp.zeros(matrix.shape, jnp.float32) for matrix in matrices)
        dx, dshares, *dmatrices = in_blocks(block, (*sums, *zeros), queues.order, start, end, config)
        return (dx, dshares), [d.astype(matrix.dtype) for d, matrix in zip(dmatrices, matrices, strict=True)]

    sums = jnp.zeros((x.size // x.shape[-1], x.shape[-1]), jnp.float32), jnp.zeros(shares.size, jnp.float32)
    (dx, dshares), matrices = jax.lax.scan(expert, sums, (queues.starts, queues.ends, fc1, fc2))
    return dx.reshape(x.shape).astype(x.dtype), None, dshares.reshape(shares.shape), *matrices, None


apply_experts.defvjp(_forward, _backward)


def weighted_mlp(x: jax.Array, shares: jax.Array, fc1: jax.Array, fc2: jax.Array, activation: Activation) -> jax.Array:
    """Apply the MLP of one expert to rows [R, D] and multiply the result by their shares [R].

    The multiplication comes before fc2, so that no gradient needs the output of fc2.
    """
    hidden = jnp.matmul(x, fc1.reshape(fc1.shape[0], -1)).reshape(-1, *fc1.shape[1:])
    hidden = activate(hidden, activation).astype(jnp.float32) * shares[:, None]
    return jnp.matmul(hidden.astype(x.dtype), fc2)


class Queues(NamedTuple):
    """Assignments sorted by expert; assignment i is choice i % k of token i // k."""

    order: jax.Array
    """Numbers [T k] of the assignments, sorted by expert."""
    starts: jax.Array
    """Places [n] in `order` at which the queue of each expert on this device begins."""
    ends: jax.Array
    """Places [n] in `order` at which the queue of each expert on this device ends."""


def queue(experts: jax.Array, count: int, first: jax.Array | int) -> Queues:
    """Sort assignments [..., k] into queues of experts first, ..., first + count - 1, each in the order of tokens."""
    numbers = first + jnp.arange(count)
    flat = experts.reshape(-1, 1)
    return Queues(jnp.argsort(flat[:, 0], stable=True), (flat < numbers).sum(axis=0), (flat <= numbers).sum(axis=0))


class Rows(NamedTuple):
    """The next R assignments of a queue; past its end the numbers are out of range and all different."""

    assignments: jax.Array
    tokens: jax.Array

    def of_tokens(self, x: jax.Array) -> jax.Array:
        """Gather the rows [R, D] of these tokens from x [B, S, D]; rows past the end of the queue are zero."""
        return x.reshape(-1, x.shape[-1]).at[self.tokens].get(mode="fill", fill_value=0, unique_indices=True)

    def of_assignments(self, shares: jax.Array) -> jax.Array:
        """Gather the shares [R] of these assignments from [B, S, k]; those past the end of the queue are zero."""
        return shares.reshape(-1).at[self.assignments].get(mode="fill", fill_value=0, unique_indices=True)


def in_blocks(
    block: Callable[[Rows, C], C], carry: C, order: jax.Array, start: jax.Array, end: jax.Array, config: ModelConfig
) -> C:
    """Work through the queue order[start:end] in blocks of R rows."""
    k = config.experts_per_token
    size = block_rows(len(order) // k, config)

    def work(i: jax.Array, carry: C) -> C:
        places = start + i * size + jnp.arange(size)
        nobody = len(order) + k * jnp.arange(size)
        assignments = jnp.where(places < end, order.at[places].get(mode="clip"), nobody)
        return block(Rows(assignments, assignments // k), carry)

    return jax.lax.fori_loop(0, (end - start + size - 1) // size, work, carry)


def block_rows(tokens: int, config: ModelConfig) -> int:
    """Return the number R of rows in a block: a quarter of the mean queue, rounded to whole tiles.

    The last block of a queue is half empty on average, which wastes an eighth of an expert's work.
    """
    mean = tokens * config.experts_per_token / config.experts
    return min(tokens, TILE * max(1, round(mean / 4 / TILE)))


def _add(sums: jax.Array, places: jax.Array, rows: jax.Array) -> jax.Array:
    return sums.at[places].add(rows.astype(jnp.float32), mode="drop", unique_indices=True)
