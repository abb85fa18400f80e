"""Forward and backward of one global batch on the mesh.

One `jax.shard_map`, manual over `pipe` and `data` and automatic over the rest. Gradients add up locally over the
microbatches and cross `data` once per step and parameter; left to the compiler, every microbatch would be reduced. With
stages, the pipeline executor runs the microbatches; with one, a plain scan does.

Shapes: M microbatches, B samples of a microbatch over all replicas, S sequence.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from megajax.models.context import Context
from megajax.models.dropout import sample_keys
from megajax.models.gpt import Gpt
from megajax.models.parameters import annotate, logical_axes
from megajax.parallel.collectives import Collectives
from megajax.parallel.layout import MeshLayout
from megajax.parallel.mesh import AUTO_AXES, MANUAL_AXES
from megajax.parallel.pipeline.executor import Executor
from megajax.parallel.pipeline.schedule import Interleaved1F1B
from megajax.parallel.remat import remat_policy
from megajax.parallel.rules import Rules

Batch = dict[str, jax.Array]
BATCH_SPEC = PartitionSpec(None, "data")


@dataclass(frozen=True)
class Runner:
    """How a batch goes through the model."""

    rules: Rules
    attention: str
    """Kernel, "xla" or "cudnn"."""
    remat: str | tuple[str, ...] = "none"
    """`train.remat`."""
    dropout_seed: int | None = None
    """Seed of the dropout masks; None for no dropout."""
    chunks: int = 1
    """Chunks of layers per pipeline stage."""
    poison: bool = False
    """Fill the pipeline's masked slots with NaN (a test)."""

    def loss_and_gradients(
        self, model: Gpt, batch: Batch, weights: jax.Array, step: jax.Array
    ) -> tuple[jax.Array, Gpt]:
        """Weighted sum of token losses and its gradient.

        Args:
            model: weights in the compute dtype.
            batch: [M, B, ...] arrays of `megajax.data.batch`.
            weights: [M, B, S] fp32 weights of the token losses.
            step: number of the step, for dropout.

        Returns:
            fp32 scalar; fp32 gradients, sharded as the parameters are at rest.
        """

        def local(model: Gpt, batch: Batch, weights: jax.Array, step: jax.Array) -> tuple[jax.Array, Gpt]:
            if self._stages > 1:
                loss, gradients = self._executor(model, batch, weights, step).loss_and_gradients()
            else:
                loss, gradients = self._accumulate(model, batch, weights, step)
            return self._net.psum(loss, "data"), annotate(gradients, lambda _, leaf: self._reduce_over_data(leaf))

        specs = annotate(model, lambda _, leaf: self.rules.at_rest(logical_axes(leaf), MANUAL_AXES))
        return self._manual(local, model, (PartitionSpec(), specs))(model, batch, weights, step)

    def loss(self, model: Gpt, batch: Batch, weights: jax.Array) -> jax.Array:
        """The loss sum alone: the forward pass of evaluation."""

        def local(model: Gpt, batch: Batch, weights: jax.Array, step: jax.Array) -> jax.Array:
            if self._stages > 1:
                return self._net.psum(self._executor(model, batch, weights, step).loss(), "data")

            def add(total: jax.Array, inputs: tuple[Batch, jax.Array]) -> tuple[jax.Array, None]:
                batch, weights = inputs
                return total + model.loss(batch, weights, self._context(model, batch, step)), None

            return self._net.psum(jax.lax.scan(add, jnp.float32(0), (batch, weights))[0], "data")

        return self._manual(local, model, PartitionSpec())(model, batch, weights, jnp.int32(0))

    @property
    def _stages(self) -> int:
        return self.rules.size("pipe")

    @property
    def _net(self) -> Collectives:
        return Collectives(self.rules.mesh)

    def _context(self, model: Gpt, batch: Batch, step: jax.Array) -> Context:
        seed = self.dropout_seed
        keys = None if seed is None else sample_keys(seed, step, batch["sample_ids"])
        return model.context(batch, MeshLayout(self.rules, self.attention), keys)

    def _executor(self, model: Gpt, batch: Batch, weights: jax.Array, step: jax.Array) -> Executor:
        schedule = Interleaved1F1B(self._stages, self.chunks, batch["tokens"].shape[0])
        context_of = lambda microbatch: self._context(model, microbatch, step)  # noqa: E731
        policy = remat_policy(self.remat)
        return Executor(model, batch, weights, schedule, self._net, context_of, policy, self.poison)

    def _accumulate(self, model: Gpt, batch: Batch, weights: jax.Array, step: jax.Array) -> tuple[jax.Array, Gpt]:
        """One microbatch after the other, forward and backward."""

        def microbatch_loss(model: Gpt, batch: Batch, weights: jax.Array) -> jax.Array:
            return model.loss(batch, weights, self._context(model, batch, step), remat_policy(self.remat))

        def add(carry: tuple[jax.Array, Gpt], inputs: tuple[Batch, jax.Array]) -> tuple[tuple[jax.Array, Gpt], None]:
            total, sums = carry
            loss, gradients = jax.value_and_grad(microbatch_loss)(model, *inputs)
            sums = jax.tree.map(lambda a, g: a + g.astype(jnp.float32), sums, gradients)
            return (total + loss, self._at_rest(sums)), None

        zeros = jax.tree.map(lambda p: jnp.zeros(p.shape, jnp.float32), model)
        return jax.lax.scan(add, (jnp.float32(0), self._at_rest(zeros)), (batch, weights))[0]

    def _at_rest(self, tree: Gpt) -> Gpt:
        # Without this the compiler all-reduces whole weight gradients over fsdp instead of reduce-scattering them.
        specs = annotate(tree, lambda _, leaf: self.rules.at_rest(logical_axes(leaf), AUTO_AXES))
        return jax.tree.map(jax.lax.with_sharding_constraint, tree, specs)

    def _reduce_over_data(self, leaf: Any) -> jax.Array:
        """Sum a gradient over `data`, keeping only this device's part where it is cut over `data` at rest."""
        axes = logical_axes(leaf)
        cuts = [self.rules.rule(axis).at_rest if axis else () for axis in axes]
        dims = [dim for dim, cut in enumerate(cuts) if "data" in cut]
        if not dims:
            return self._net.psum(leaf[...], "data")

        def scatter(gradient: jax.Array) -> jax.Array:
            return self._net.reduce_scatter(gradient, "data", dims[0])

        if self.rules.size("fsdp") > 1:
            # `data` cuts before `fsdp` does, so shards change hands: left to the compiler, which gathers them first.
            return scatter(leaf[...])
        # Left to the compiler, this would gather what `tensor` cuts.
        spec = self.rules.at_rest(axes, AUTO_AXES)
        local = jax.shard_map(scatter, in_specs=spec, out_specs=spec, axis_names=set(AUTO_AXES), check_vma=False)
        return local(leaf[...])

    def _manual(self, fn: Callable[..., Any], model: Gpt, out_specs: Any) -> Callable[..., Any]:
        specs = annotate(model, lambda _, leaf: self.rules.in_compute(logical_axes(leaf), MANUAL_AXES))
        return jax.shard_map(
            fn,
            mesh=self.rules.mesh,
            in_specs=(specs, BATCH_SPEC, BATCH_SPEC, PartitionSpec()),
            out_specs=out_specs,
            axis_names=set(MANUAL_AXES),
            check_vma=False,
        )
