"""A mesh whose partitioning is left to the compiler: what a forward pass without gradients needs.

Training steps into manual regions, because a gradient must cross `data` once a step and no operator may be partitioned
by chance (see `parallel.run`). Generation and evaluation have neither trouble: weights lie as the rules say they rest,
rows of a batch are cut over `data` and `fsdp`, heads, MLP and vocabulary over `tensor`, and plain `jax.jit` does the
rest. Over `tensor` a layer sends two all-reduces of [B, S, D]; over `fsdp` it gathers its weights; over `data` nothing.

Shapes: B batch, S sequence, D embed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar

import jax
from flax import nnx
from jax.sharding import NamedSharding

from megajax.config.parallel import AXES
from megajax.models.layout import Layout
from megajax.models.parameters import logical_axes
from megajax.parallel.rules import Rules

M = TypeVar("M")


@dataclass(frozen=True)
class Partitioned(Layout):
    """Any sizes of data, fsdp, expert and tensor, under `jax.jit` (of which this may be a static argument)."""

    rules: Rules

    @property
    def replicas(self) -> int:
        """Ways in which the rows of a batch are cut."""
        return self.rules.size("data", "fsdp")

    def weights(self, module: M) -> M:
        """Gather the weights over `fsdp`."""

        def gather(param: nnx.Variable) -> nnx.Variable:
            return param.replace(self.shard(param[...], *logical_axes(param)))

        return jax.tree.map(gather, module, is_leaf=lambda node: isinstance(node, nnx.Variable))

    def leave_tensor(self, x: jax.Array) -> jax.Array:
        """All-reduce partial sums over `tensor`."""
        return self.shard(x, "batch", None, None)

    def shard(self, x: jax.Array, *axes: str | None) -> jax.Array:
        """Constrain an array to the rules of its logical axes."""
        return jax.lax.with_sharding_constraint(x, NamedSharding(self.rules.mesh, self.rules.in_compute(axes, AXES)))
