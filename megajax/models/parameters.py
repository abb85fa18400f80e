"""Parameters by name: a model is a pytree of `nnx.Param`s, each carrying its logical axes and its role.

The same functions read any tree that holds copies of the model (gradients, optimizer moments, a whole train state).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import jax
from flax import nnx

T = TypeVar("T")


def named_leaves(tree: Any) -> list[tuple[str, Any]]:
    """Every leaf with its dotted name, in tree order; a parameter stays an `nnx.Param`, to show its metadata."""
    leaves = jax.tree_util.tree_leaves_with_path(tree, is_leaf=lambda node: isinstance(node, nnx.Variable))
    return [(".".join(str(_part(key)) for key in path), leaf) for path, leaf in leaves]


def _part(key: Any) -> Any:
    """The human part of a pytree path entry: an attribute's name, a dict key, a list index."""
    return getattr(key, "name", getattr(key, "key", getattr(key, "idx", key)))


def annotate(tree: T, fn: Callable[[str, Any], Any]) -> T:
    """A tree of the same structure with fn(name, leaf) in the place of every array."""
    return jax.tree.unflatten(jax.tree.structure(tree), [fn(name, leaf) for name, leaf in named_leaves(tree)])


def logical_axes(leaf: Any) -> tuple[str, ...]:
    """Logical axis of every dimension; weights stacked by layer have "layers" in front. Scalars have none."""
    axes = leaf.get_metadata().get("axes", ()) if isinstance(leaf, nnx.Variable) else ()
    return ("layers", *axes) if len(leaf.shape) == len(axes) + 1 else axes


def roles(model: T) -> T:
    """Role of every parameter: "matrix", "embedding", "bias" or "norm"."""
    return annotate(model, lambda _, param: param.get_metadata()["role"])


def cast(model: T, dtype: Any) -> T:
    """The model with all weights in another dtype (the compute copy of fp32 master weights)."""
    return jax.tree.map(lambda x: x.astype(dtype), model)
