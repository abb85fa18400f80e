"""Layout on a mesh whose partitioning is left to the compiler, for forward passes without gradients.

Training uses manual regions, because a gradient must cross `data` once a step and no operator may be partitioned by
chance (see `parallel.run`). `megajax.generate` and `megajax.evaluate` need neither: weights lie as the rules place them
at rest, rows of a batch are cut over `data` and `fsdp`, heads, MLP and vocabulary over `tensor`, and plain `jax.jit`
does the rest. A layer sends two all-reduces of [B, S, D] over `tensor`, gathers its weights over `fsdp`, and sends
nothing over `data`. A mixture of experts runs in a manual region here too, since no partitioner can cut a router's
choices.

Shapes: B batch, S sequence, D embed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar

import jax
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

from megajax.config.model import ModelConfig
from megajax.config.parallel import AXES
from megajax.models import experts
from megajax.models.experts import Weights
from megajax.models.layout import Layout, Table
from megajax.models.losses import Losses
from megajax.models.parameters import logical_axes
from megajax.parallel.collectives import Collectives
from megajax.parallel.rules import Axes, Rules

M = TypeVar("M")


@dataclass(frozen=True)
class Partitioned(Layout):
    """Lay models out over data, fsdp, expert and tensor under `jax.jit`, which may take the layout as a static
    argument.
    """

    rules: Rules

    @property
    def replicas(self) -> int:
        """Return the number of parts into which the rows of a batch are cut."""
        return self.rules.size(*self.rules.rule("batch").in_compute)

    def weights(self, module: M) -> M:
        """Gather the weights of a module over `fsdp`."""

        def gather(param: nnx.Variable) -> nnx.Variable:
            return param.replace(self.shard(param[...], *logical_axes(param)))

        return jax.tree.map(gather, module, is_leaf=lambda node: isinstance(node, nnx.Variable))

    def leave_tensor(self, x: jax.Array) -> jax.Array:
        """All-reduce partial sums over `tensor`."""
        return self.shard(x, "batch", None, None)

    def shard(self, x: jax.Array, *axes: str | None) -> jax.Array:
        """Constrain an array to the rules of its logical axes."""
        return jax.lax.with_sharding_constraint(x, NamedSharding(self.rules.mesh, self._spec(axes)))

    def lookup(self, *tables: Table) -> jax.Array:
        """Look up rows in tables that are first gathered over `fsdp`; the compiler would send more."""
        whole = [(self.shard(weights, rows, None), ids, rows) for weights, ids, rows in tables]
        return self.shard(super().lookup(*whole), "batch", None, None)

    def experts(
        self, x: jax.Array, weights: Weights, token_weights: jax.Array | None, config: ModelConfig
    ) -> tuple[jax.Array, Losses]:
        """Compute a mixture whose experts receive the tokens of all devices along `expert` (see `parallel.experts`)."""
        net = Collectives(self.rules.mesh)

        def local(x: jax.Array, weights: Weights) -> jax.Array:
            routing = experts.route(x, weights.router, config)
            x, numbers, shares = (net.all_gather(a, "expert", dim=0) for a in (x, routing.experts, routing.shares))
            fc1, fc2 = net.all_gather(weights.fc1, "fsdp", dim=1), net.all_gather(weights.fc2, "fsdp", dim=2)
            first = net.index("expert") * len(fc1)
            y = experts.apply_experts(x, numbers, shares, fc1, fc2, first, config)
            return net.psum(net.reduce_scatter(y, "expert", dim=0), "tensor")

        tokens, cuts = self._spec(("batch", None, None)), Weights(*map(self._spec, experts.AXES))
        run = jax.shard_map(local, mesh=self.rules.mesh, in_specs=(tokens, cuts), out_specs=tokens, check_vma=False)
        return run(x, weights), {}

    def _spec(self, axes: Axes) -> PartitionSpec:
        return self.rules.in_compute(axes, AXES)
