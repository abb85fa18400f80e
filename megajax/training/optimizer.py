"""Update rules, weight decay, clipping and the skippable update, over any pytree of parameters.

An optimizer here is an `optax.GradientTransformation` whose update is the *direction* u of `params <- params - lr * u`.
The learning rate stays outside because it is a function of the samples in the train state (`schedule.py`), and a
skipped step must not advance it.

Who gets what follows from the role of a parameter, not from its name or rank (stacking layers adds dimensions):

| role      | weight decay | muon  |
|-----------|--------------|-------|
| matrix    | yes          | muon  |
| embedding | yes          | adamw |
| bias      | no           | adamw |
| norm      | no           | adamw |

State is one flat NamedTuple of optax (`count`, `mu`, `nu` as the rule needs), whose moments have the tree of the
parameters, so shardings and checkpoints treat them alike. muon has two such tuples (`MuonAdamWState`); a parameter that
one of them does not own is None there, which is no leaf at all.

muon orthogonalises every matrix by itself, as Megatron-LM does by default: queries, keys and values of a fused weight,
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

from megajax.config.optim import OptimConfig
from megajax.models.parameters import part_sizes

DECAYED_ROLES = ("matrix", "embedding")
EMBED_AXES = ("embed", "expert_embed")
"""Logical axes of the dimension that a matrix shares with the residual stream."""
MUON_RMS = 0.2
"""Root mean square of muon's update: like AdamW's, so that one learning rate serves both (2502.16982, eq. 4)."""

PyTree = Any


class MuonAdamWState(NamedTuple):
    """Moments of the matrices, and of everything else."""

    muon: MuonState
    adamw: optax.ScaleByAdamState


def build_optimizer(config: OptimConfig, roles: PyTree, axes: PyTree) -> optax.GradientTransformation:
    """The update rule of `config.name` with decoupled weight decay, without the learning rate.

    Args:
        config: Rule and constants.
        roles: Tree of the parameters, leaves "matrix", "embedding", "bias" or "norm".
        axes: Tree of the parameters, leaves tuples of logical axis names without the stacking dimensions (for muon).
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
    """Muon with Nesterov momentum and 5 Newton-Schulz iterations on the matrices (Jordan 2024), AdamW on the rest."""
    adamw = optax.scale_by_adam(config.beta1, config.beta2, config.eps)

    # A matrix has two sides: a vector that decays (the gate of a shared expert) is for AdamW.
    is_matrix = jax.tree.map(lambda role, names: role == "matrix" and len(names) > 1, roles, axes)

    def split(tree: PyTree) -> tuple[PyTree, PyTree]:
        matrices = jax.tree.map(lambda matrix, x: x if matrix else None, is_matrix, tree)
        others = jax.tree.map(lambda matrix, x: None if matrix else x, is_matrix, tree)
        return matrices, others

    matrix_axes, _ = split(axes)

    def apart(matrices: PyTree) -> PyTree:
        return jax.tree.map(_unfused, matrices, matrix_axes)

    def together(parts: PyTree, matrices: PyTree) -> PyTree:
        return jax.tree.map(lambda x, names, parts: _fused(parts, names, x.shape), matrices, matrix_axes, parts)

    def dimensions(parts: PyTree, matrices: PyTree) -> PyTree:
        sides = lambda x, names, parts: [matrix_dimensions(names, x.ndim)] * len(parts)  # noqa: E731
        return jax.tree.map(sides, matrices, matrix_axes, parts)

    def init(params: PyTree) -> MuonAdamWState:
        matrices, others = split(params)
        return MuonAdamWState(scale_by_muon().init(matrices), adamw.init(others))

    def update(grads: PyTree, state: MuonAdamWState, params: PyTree | None = None) -> tuple[PyTree, MuonAdamWState]:
        matrices, others = split(grads)
        # Moments are kept like the weights, and taken apart for the update.
        parts, moments = apart(matrices), state.muon._replace(mu=apart(state.muon.mu))
        dims = dimensions(parts, matrices)
        muon = scale_by_muon(beta=config.momentum, weight_dimension_numbers=dims)
        orthogonal, moments = muon.update(parts, moments)
        u_matrices = together(jax.tree.map(_scale_to_rms, orthogonal, dims), matrices)
        u_others, adamw_state = adamw.update(others, state.adamw)
        merged = jax.tree.map(lambda matrix, m, o: m if matrix else o, is_matrix, u_matrices, u_others)
        return merged, MuonAdamWState(moments._replace(mu=together(moments.mu, matrices)), adamw_state)

    return optax.GradientTransformation(init, update)


def _unfused(x: jax.Array, axes: tuple[str, ...]) -> list[jax.Array]:
    """The matrices that a weight is made of."""
    dim, sizes = part_sizes(axes, x.shape)
    return jnp.split(x, np.cumsum(sizes)[:-1], axis=dim)


def _fused(parts: list[jax.Array], axes: tuple[str, ...], shape: tuple[int, ...]) -> jax.Array:
    """The inverse of `_unfused`, to an array of that shape."""
    return jnp.concatenate(parts, axis=part_sizes(axes, shape)[0])


def matrix_dimensions(axes: tuple[str, ...], ndim: int) -> MuonDimensionNumbers:
    """Which dimensions of a weight are the rows and columns of its matrix; experts and leading ones are a batch.

    A block weight maps from or to the residual stream, so the embedding is one side and everything else the other:
    queries [L, D, K, G, H] are D x (K G H), attention output [L, N, H, D] is (N H) x D, fc1 of an expert D x F.
    """
    axes = axes[1:] if axes[0] == "experts" else axes
    dims = tuple(range(ndim - len(axes), ndim))
    if axes[0] in EMBED_AXES:
        return MuonDimensionNumbers(reduction_axis=dims[:1], output_axis=dims[1:])
    if axes[-1] in EMBED_AXES:
        return MuonDimensionNumbers(reduction_axis=dims[:-1], output_axis=dims[-1:])
    raise ValueError(f"muon: a matrix with axes {axes} has no embed side; give it another role")


def _scale_to_rms(orthogonal: jax.Array, dims: MuonDimensionNumbers) -> jax.Array:
    """An orthogonal rows x cols matrix has root mean square 1 / sqrt(max(rows, cols)); bring it to MUON_RMS."""
    rows, cols = (math.prod(orthogonal.shape[d] for d in side) for side in dims)
    return MUON_RMS * max(rows, cols) ** 0.5 * orthogonal


def global_norm(tree: PyTree) -> jax.Array:
    """L2 norm over all leaves in float32, each global element once, however it is sharded or replicated."""
    return jnp.sqrt(sum(jnp.sum(jnp.square(x.astype(jnp.float32))) for x in jax.tree.leaves(tree)))


def clip_by_global_norm(grads: PyTree, max_norm: float) -> tuple[PyTree, jax.Array]:
    """Scale gradients so that their norm is at most `max_norm` (0 = leave them); returns them and the norm before.

    The coefficient is Megatron-LM's max_norm / (norm + 1e-6), used when it is below 1.
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
    """One optimizer step, or none: where `skip` (bool scalar) is True, every output leaf is the input leaf.

    Selecting leaf by leaf, rather than branching, keeps the update fused and in place when the inputs are donated, and
    ignores the nan that a skipped update is full of.
    """
    direction, new_state = optimizer.update(grads, opt_state, params)
    new_params = jax.tree.map(lambda p, u: p - lr * u, params, direction)
    old, new = (params, opt_state), (new_params, new_state)
    return jax.tree.map(lambda before, after: jnp.where(skip, before, after), old, new)
