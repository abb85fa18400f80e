"""Parameters by name: a model is a pytree of `nnx.Param`s, each carrying its logical axes and its role.

The functions also read trees with copies of the model (gradients, optimizer moments, a whole train state).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import jax
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
