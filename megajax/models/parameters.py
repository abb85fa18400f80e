"""Parameters of a model, a pytree of `nnx.Param`s: declared in one line each, and read by name.

A parameter has an initial value, logical axes and a role. A logical axis names the meaning of a dimension (`embed`,
`mlp`, ...); `megajax.parallel.rules` decides over which mesh axis it is sharded. A role decides how the optimizer
treats a parameter: weight decay acts on "matrix" and "embedding" alone.

The functions that read a model also read trees with copies of it (gradients, optimizer moments, a whole train state).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from statistics import NormalDist
from typing import Any, Literal, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

T = TypeVar("T")


def named_leaves(tree: Any) -> list[tuple[str, Any]]:
    """List every leaf with its dotted name, in tree order; a parameter stays an `nnx.Param`, with its metadata."""
    is_param = lambda node: isinstance(node, nnx.Variable) and bool(jax.tree.leaves(node))  # noqa: E731
    leaves = jax.tree_util.tree_leaves_with_path(tree, is_leaf=is_param)
    return [(".".join(str(_part(key)) for key in path), leaf) for path, leaf in leaves]


def _part(key: Any) -> Any:
    """Return the readable part of an entry in a pytree path: an attribute's name, a dict key, a list index."""
    return getattr(key, "name", getattr(key, "key", getattr(key, "idx", key)))


def annotate(tree: T, fn: Callable[[str, Any], Any]) -> T:
    """Return a tree of the same structure with fn(name, leaf) in place of every array."""
    return jax.tree.unflatten(jax.tree.structure(tree), [fn(name, leaf) for name, leaf in named_leaves(tree)])


def logical_axes(leaf: Any) -> tuple[str | None, ...]:
    """Return the logical axis of every dimension of a leaf.

    Weights stacked by layer begin with "layers", or with "chunks" and "layers" in an interleaved pipeline. Dimensions
    of arrays that belong to no parameter (counters, constants) have no names.
    """
    if not isinstance(leaf, nnx.Variable):
        return (None,) * len(leaf.shape)
    axes = leaf.get_metadata()["axes"]
    return (*("chunks", "layers")[2 + len(axes) - len(leaf.shape) :], *axes)


def part_sizes(axes: tuple[str, ...], shape: tuple[int, ...]) -> tuple[int, tuple[int, ...]]:
    """Return the dimension that the matrices of a fused weight share, and the size of each matrix in it.

    Queries, keys and values ([..., G + 2, ...]) are three matrices, keys and values of T5's cross-attention two, gate
    and up two; any other weight is one.

    Args:
        axes: logical axes of one layer's weight.
        shape: shape of the weight, with or without leading dimensions for stacking.
    """
    for axis, sizes in _FUSED.items():
        if axis in axes:
            dim = len(shape) - len(axes) + axes.index(axis)
            return dim, tuple(size for size in sizes(shape[dim]) if size)
    return len(shape) - 1, shape[-1:]


_FUSED: dict[str, Callable[[int], tuple[int, ...]]] = {
    "qkv_in_group": lambda size: (size - 2, 1, 1),
    "gate_up": lambda size: (1,) * size,
}


def roles(model: T) -> T:
    """Return the role of every parameter: "matrix", "embedding", "bias" or "norm"."""
    return annotate(model, lambda _, param: param.get_metadata()["role"])


def split_layers(tree: T, chunks: int) -> T:
    """Reshape stacked weights [L, ...] to [chunks, L / chunks, ...] for an interleaved pipeline.

    With one chunk they keep their shape.
    """
    return _restack(tree, "layers", lambda x: x.reshape(chunks, -1, *x.shape[1:])) if chunks > 1 else tree


def join_layers(tree: T) -> T:
    """Return weights as checkpoints hold them, whatever the pipeline; this is the inverse of `split_layers`."""
    return _restack(tree, "chunks", lambda x: x.reshape(-1, *x.shape[2:]))


def _restack(tree: T, first: str, fn: Callable[[jax.Array], jax.Array]) -> T:
    return annotate(tree, lambda _, leaf: fn(leaf[...]) if logical_axes(leaf)[:1] == (first,) else _array(leaf))


def _array(leaf: Any) -> jax.Array:
    return leaf[...] if isinstance(leaf, nnx.Variable) else leaf


def cast(model: T, dtype: Any) -> T:
    """Return the model with all weights in another dtype, as the compute copy of fp32 master weights."""
    return jax.tree.map(lambda x: x.astype(dtype), model)


Role = Literal["matrix", "embedding", "bias", "norm"]


def normal(
    key: jax.Array, shape: tuple[int, ...], std: float, axes: tuple[str, ...], role: Role = "matrix"
) -> nnx.Param:
    """Draw weights from N(0, std^2), fp32."""
    return nnx.Param(exact_normal(key, shape, std), axes=axes, role=role)


def zeros(shape: tuple[int, ...], axes: tuple[str, ...]) -> nnx.Param:
    """Make a bias, all zeros."""
    return nnx.Param(jnp.zeros(shape, jnp.float32), axes=axes, role="bias")


def norm_scale(size: int, axis: str, value: float = 1.0) -> nnx.Param:
    """Make the gain of a norm, all ones unless another value is given."""
    return nnx.Param(jnp.full((size,), value, jnp.float32), axes=(axis,), role="norm")


def norm_bias(size: int, axis: str) -> nnx.Param:
    """Make the shift of a LayerNorm, all zeros."""
    return nnx.Param(jnp.zeros((size,), jnp.float32), axes=(axis,), role="norm")


def exact_normal(key: jax.Array, shape: tuple[int, ...], std: float) -> jax.Array:
    """Draw numbers from N(0, std^2) whose bits depend on key, shape and std, but not on sharding, compiler or device.

    `jax.random.normal` evaluates a polynomial, which compilers round differently in the middle and at the edge of a
    shard. Here a number is (a + b) * constant: two rounded operations that compilers cannot change. The halves of 32
    random bits select a and b from a table of 2^16 normal quantiles, which gives 2^32 values up to 6.1 standard
    deviations.
    """
    bits = jax.random.bits(key, shape, jnp.uint32)
    table = jnp.asarray(_quantiles())
    return (table[bits >> 16] + table[bits & 0xFFFF]) * jnp.float32(std * 0.5**0.5)


@cache
def _quantiles() -> np.ndarray:
    """Return the centres of 2^16 equally likely slices of N(0, 1), scaled to variance 1."""
    inverse = NormalDist().inv_cdf
    values = np.array([inverse((i + 0.5) / 2**16) for i in range(2**16)])
    return (values / values.std()).astype(np.float32)
