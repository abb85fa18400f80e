"""Optimizers: update rules, weight decay, clipping and the skippable update, over any pytree of parameters.

An optimizer here is an `optax.GradientTransformation` whose update is the *direction* u of `params <- params - lr * u`.
The learning rate stays outside because it is a function of the samples in the train state (`schedule.py`), and a
skipped step must not advance it.

The role of a parameter decides, not its name or rank (stacking layers adds dimensions):

| role      | weight decay | muon  |
|-----------|--------------|-------|
| matrix    | yes          | muon  |
| embedding | yes          | adamw |
| bias      | no           | adamw |
| norm      | no           | adamw |

The state is one flat NamedTuple of optax (`count`, `mu`, `nu` as the rule needs), whose moments have the tree of the
parameters, so that shardings and checkpoints treat them alike. muon has two such tuples (`MuonAdamWState`); a parameter
that one of them does not own is None there, which JAX does not count as a leaf.

muon orthogonalises every matrix separately, as Megatron-LM does by default: queries, keys and values of a fused weight,
gate and up, each expert and each layer.

Shapes: L layers (and any other stacking) leading; D embed, N heads, K kv heads, H head dim, F mlp.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from optax.contrib import MuonDimensionNumbers, MuonState, scale_by_muon

from megajax.config.train import OptimConfig
from megajax.models.parameters import part_sizes

DECAYED_ROLES = ("matrix", "embedding")
EMBED_AXES = ("embed", "expert_embed")
"""Logical axes that stand for the dimension which a matrix shares with the residual stream."""
MUON_RMS = 0.2
"""Root mean square of muon's update, chosen like AdamW's, so that one learning rate serves both (2502.16982, eq. 4)."""

PyTree = Any


class MuonAdamWState(NamedTuple):
    """Muon's moments of the matrices, and AdamW's of all other parameters."""

    muon: MuonState
    adamw: optax.ScaleByAdamState


def build_optimizer(config: OptimConfig, roles: PyTree, axes: PyTree) -> optax.GradientTransformation:
    """Build the update rule of `config.name` with decoupled weight decay, without the learning rate.

    Args:
        config: update rule and its constants.
        roles: role of every parameter, in the tree of the parameters: "matrix", "embedding", "bias" or "norm".
        axes: logical axis names of every parameter, in the same tree, without the stacking dimensions (for muon).
    """
    match config.name:
        case "adamw":
            rule = optax.scale_by_adam(config.beta1, config.beta2, config.eps)
        case "sgd":
            rule = optax.trace(config.momentum)
        case "lion":
            rule = optax.scale_by_lion(config.beta1, config.beta2)
        case "muon":
            rule = _muon_and_adamw(config, roles, axes)

    def update(grads: PyTree, state: PyTree, params: PyTree | None = None) -> tuple[PyTree, PyTree]:
        direction, state = rule.update(grads, state, params)
        decayed = jax.tree.map(
            lambda role, u, p: u + config.weight_decay * p if role in DECAYED_ROLES else u, roles, direction, params
        )
        return decayed, state

    return optax.GradientTransformation(rule.init, update)


def _muon_and_adamw(config: OptimConfig, roles: PyTree, axes: PyTree) -> optax.GradientTransformation:
    """Build Muon (Nesterov momentum, 5 Newton-Schulz steps; Jordan 2024) for matrices, and AdamW for the rest."""
    adamw = optax.scale_by_adam(config.beta1, config.beta2, config.eps)

    # A matrix has two sides; a vector with the role of a matrix (the gate of a shared expert) goes to AdamW.
    is_matrix = jax.tree.map(lambda role, names: role == "matrix" and len(names) > 1, roles, axes)

    def split(tree: PyTree) -> tuple[PyTree, PyTree]:
        matrices = jax.tree.map(lambda matrix, x: x if matrix else None, is_matrix, tree)
        others = jax.tree.map(lambda matrix, x: None if matrix else x, is_matrix, tree)
        return matrices, others

    matrix_axes, _ = split(axes)

    def init(params: PyTree) -> MuonAdamWState:
        matrices, others = split(params)
        return MuonAdamWState(scale_by_muon().init(matrices), adamw.init(others))

    def update(grads: PyTree, state: MuonAdamWState, params: PyTree | None = None) -> tuple[PyTree, MuonAdamWState]:
        matrices, others = split(grads)
        moved = jax.tree.map(
            lambda g, names, mu: _orthogonal(g, mu, names, state.muon, config.momentum),
            matrices, matrix_axes, state.muon.mu,
        )  # fmt: skip
        u_matrices, mu = (jax.tree.map(lambda _, both, i=i: both[i], matrices, moved) for i in (0, 1))
        muon = state.muon._replace(count=optax.safe_increment(state.muon.count), mu=mu)
        u_others, adamw_state = adamw.update(others, state.adamw)
        merged = jax.tree.map(lambda matrix, m, o: m if matrix else o, is_matrix, u_matrices, u_others)
        return merged, MuonAdamWState(muon, adamw_state)

    return optax.GradientTransformation(init, update)


def _orthogonal(
    gradient: jax.Array, moment: jax.Array, axes: tuple[str, ...], state: MuonState, momentum: float
) -> tuple[jax.Array, jax.Array]:
    """Return the update and the new moment of one weight, orthogonalising every matrix in it separately.

    Experts and stacking dimensions are mapped over one by one. Optax would merge them into one dimension, which no mesh
    can cut as they were cut: every device would gather, and orthogonalise, the experts and layers of all others.
    """
    axes = axes[1:] if axes[0] == "experts" else axes

    def one(gradient: jax.Array, moment: jax.Array) -> tuple[jax.Array, jax.Array]:
        dim, sizes = part_sizes(axes, gradient.shape)
        parts, moments = (jnp.split(x, np.cumsum(sizes)[:-1], axis=dim) for x in (gradient, moment))
        sides = matrix_sides(axes)
        muon = scale_by_muon(beta=momentum, weight_dimension_numbers=[sides] * len(sizes))
        orthogonal, after = muon.update(parts, state._replace(mu=moments))
        scaled = [_scale_to_rms(x, sides) for x in orthogonal]
        return jnp.concatenate(scaled, dim), jnp.concatenate(after.mu, dim)

    for _ in range(gradient.ndim - len(axes)):
        one = jax.vmap(one)
    return one(gradient, moment)


def matrix_sides(axes: tuple[str, ...]) -> MuonDimensionNumbers:
    """Return which dimensions of a weight, for one layer and one expert, are the rows and columns of its matrix.

    A block weight maps from or to the residual stream, so the embedding is one side and all other dimensions are the
    other: queries [D, K, G, H] are D x (K G H), attention output [N, H, D] is (N H) x D, fc1 of an expert D x F.
    """
    dims = tuple(range(len(axes)))
    if axes[0] in EMBED_AXES:
        return MuonDimensionNumbers(reduction_axis=dims[:1], output_axis=dims[1:])
    if axes[-1] in EMBED_AXES:
        return MuonDimensionNumbers(reduction_axis=dims[:-1], output_axis=dims[-1:])
    raise ValueError(f"muon: a matrix with axes {axes} has no embed side; give it another role")


def _scale_to_rms(orthogonal: jax.Array, dims: MuonDimensionNumbers) -> jax.Array:
    """Scale an orthogonal rows x cols matrix, whose root mean square is 1 / sqrt(max(rows, cols)), to MUON_RMS."""
    rows, cols = (math.prod(orthogonal.shape[d] for d in side) for side in dims)
    return MUON_RMS * max(rows, cols) ** 0.5 * orthogonal


def global_norm(tree: PyTree) -> jax.Array:
    """Return the L2 norm over all leaves in float32; each element counts once, however it is sharded or replicated."""
    return jnp.sqrt(sum(jnp.sum(jnp.square(x.astype(jnp.float32))) for x in jax.tree.leaves(tree)))


def clip_by_global_norm(grads: PyTree, max_norm: float) -> tuple[PyTree, jax.Array]:
    """Scale gradients so that their norm is at most `max_norm` (0 = no limit); return them and the norm before.

    The coefficient is Megatron-LM's max_norm / (norm + 1e-6) where that is below 1.
    """
    norm = global_norm(grads)
    if max_norm == 0:
        return grads, norm
    coefficient = jnp.minimum(max_norm / (norm + 1e-6), 1.0)
    return jax.tree.map(lambda g: g * coefficient.astype(g.dtype), grads), norm


def apply_update(
    params: PyTree,
    opt_state: PyTree,
    grads: PyTree,
    lr: jax.Array,
    optimizer: optax.GradientTransformation,
    skip: jax.Array,
) -> tuple[PyTree, PyTree]:
    """Take one optimizer step, or none: where `skip` (bool scalar) is True, every output leaf is the input leaf.

    Selecting leaf by leaf, rather than branching, keeps the update fused and in place when the inputs are donated, and
    discards the nan in a skipped update.
    """
    direction, new_state = optimizer.update(grads, opt_state, params)
    new_params = jax.tree.map(lambda p, u: p - lr * u, params, direction)
    old, new = (params, opt_state), (new_params, new_state)
    return jax.tree.map(lambda before, after: jnp.where(skip, before, after), old, new)
