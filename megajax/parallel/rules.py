"""Sharding rules: one table from every logical axis to mesh axes, with two views.

An array has one sharding at rest (in memory, between steps) and another one in the computation: a weight is also split
over `fsdp` at rest, and gathered when its layer runs. Activations have only the second. Sequence parallelism is one
word in one row (`tensor` under "residual_sequence"), and so is ZeRO-1 (`data` at rest under "embed").
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Any, NamedTuple, TypeVar

from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from megajax.config.base import InputError
from megajax.config.model import ModelConfig
from megajax.config.parallel import AXES, REPLICAS, ParallelConfig
from megajax.models.parameters import annotate, logical_axes
from megajax.parallel.mesh import AUTO_AXES

T = TypeVar("T")
Axes = tuple[str | None, ...]


class Rule(NamedTuple):
    """The mesh axes over which one logical axis is sharded, and the reason."""

    logical: str
    at_rest: tuple[str, ...]
    in_compute: tuple[str, ...]
    why: str


RULES: tuple[Rule, ...] = (
    # Parameters
    Rule("chunks", (), (), "a stage holds a part of every chunk of layers (interleaved pipeline)"),
    Rule("layers", ("pipe",), ("pipe",), "a stage holds its layers only"),
    Rule("vocab", ("pipe", "tensor"), ("pipe", "tensor"), "all stages share embedding and head (1909.08053 §3)"),
    Rule("kv_heads", ("tensor",), ("tensor",), "column-parallel QKV, whole groups of heads (1909.08053 §3)"),
    Rule("heads", ("tensor",), ("tensor",), "row-parallel attention output"),
    Rule("mlp", ("tensor",), ("tensor",), "column-parallel fc1, row-parallel fc2"),
    Rule("embed", ("fsdp",), (), "ZeRO-3 (1910.02054): split at rest, gathered when the layer runs"),
    Rule("experts", ("expert",), ("expert",), "a device holds its experts only (2006.16668)"),
    Rule("expert_embed", ("fsdp",), ("fsdp",), "as embed, but gathered where the experts run: see parallel.experts"),
    Rule("router", (), (), "every token meets the whole router"),
    Rule("positions", ("tensor",), ("tensor",), "as the vocabulary: both lookups share one reduction"),
    Rule("norm", (), (), "norm gains and row-parallel biases are small: replicated"),
    Rule("head_dim", (), (), "a head is never cut"),
    Rule("qkv_in_group", (), (), "q, k and v of a group stay together"),
    Rule("gate_up", (), (), "gate and up of a unit stay together"),
    Rule("few", (), (), "token types, distance buckets, classes: too few to cut"),
    # Activations
    Rule("batch", (), REPLICAS, "each replica its own samples"),
    Rule("sequence", (), ("context",), "inside attention and MLP"),
    Rule("residual_sequence", (), ("context", "tensor"), "sequence parallelism (2205.05198 §4.2.2)"),
)


@dataclass(frozen=True)
class Rules:
    """Bind the table of sharding rules to a mesh."""

    mesh: Mesh | AbstractMesh
    sequence_parallel: bool = True
    zero: int = 0
    whole_heads: bool = False
    whole_positions: bool = False

    @classmethod
    def of(cls, mesh: Mesh | AbstractMesh, parallel: ParallelConfig, model: ModelConfig) -> Rules:
        """Return the rules of a configuration.

        A table of positions whose rows do not divide over `tensor` is not cut.
        """
        whole = model.position_rows % mesh.shape["tensor"] != 0
        return cls(mesh, parallel.sequence_parallel, parallel.zero, parallel.whole_heads, whole)

    def rule(self, logical: str) -> Rule:
        """Return the row of a logical axis."""
        for rule in RULES:
            if rule.logical == logical:
                if logical in ("kv_heads", "heads") and self.whole_heads:
                    return rule._replace(at_rest=(), in_compute=())
                if logical == "positions" and self.whole_positions:
                    return rule._replace(at_rest=(), in_compute=())
                if logical == "residual_sequence" and not self.sequence_parallel:
                    return rule._replace(in_compute=("context",))
                if logical in ("embed", "expert_embed") and self.zero:
                    return rule._replace(at_rest=("data", "fsdp"))
                return rule
        raise KeyError(f"no sharding rule for logical axis {logical!r}: add a row to megajax.parallel.rules.RULES")

    def size(self, *mesh_axes: str) -> int:
        """Return the number of devices along the given mesh axes."""
        return prod(self.mesh.shape[axis] for axis in mesh_axes)

    def at_rest(self, axes: Axes, over: tuple[str, ...] = AXES) -> PartitionSpec:
        """Return the sharding at rest of an array with these logical axes, restricted to the mesh axes in `over`."""
        return _spec([self.rule(axis).at_rest if axis else () for axis in axes], over)

    def in_compute(self, axes: Axes, over: tuple[str, ...] = AUTO_AXES) -> PartitionSpec:
        """Return the sharding in the computation of an array with these logical axes, restricted to the mesh axes in
        `over`.
        """
        return _spec([self.rule(axis).in_compute if axis else () for axis in axes], over)

    def shardings(self, state: T) -> T:
        """Return the sharding at rest of every array of a state tree (parameters, moments, counters).

        Raises:
            InputError: a dimension is not divisible by the mesh axes that its rule names.
        """
        return annotate(state, self._sharding)

    def _sharding(self, name: str, leaf: Any) -> NamedSharding:
        axes = logical_axes(leaf)
        for dim, axis, size in zip(range(len(axes)), axes, leaf.shape, strict=True):
            ways = self.size(*self.rule(axis).at_rest) if axis else 1
            if axis and size % ways:
                raise InputError(
                    f"{name}: dim {dim} ({axis}) has {size} entries, not divisible by "
                    f"{' x '.join(self.rule(axis).at_rest)} = {ways}: choose parallel sizes that divide it"
                )
        return NamedSharding(self.mesh, self.at_rest(axes))


def _spec(mesh_axes: list[tuple[str, ...]], over: tuple[str, ...]) -> PartitionSpec:
    return PartitionSpec(*(tuple(name for name in names if name in over) or None for names in mesh_axes))
