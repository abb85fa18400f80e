"""Forward and backward of one global batch on the mesh.

A step is one `jax.shard_map`, manual over `pipe` and `data` and automatic over the rest. Gradients are summed locally
over the microbatches and cross `data` once per step and parameter; the compiler would send them once per microbatch.
With stages, the pipeline executor runs the microbatches; without, a plain scan does.

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
from megajax.models.losses import Losses, objective
from megajax.models.model import Batch, Model
from megajax.models.parameters import annotate, logical_axes
from megajax.parallel.collectives import Collectives
from megajax.parallel.layout import MeshLayout
from megajax.parallel.mesh import AUTO_AXES, MANUAL_AXES
from megajax.parallel.pipeline.executor import Executor
from megajax.parallel.pipeline.schedule import Interleaved1F1B
from megajax.parallel.remat import remat_policy
from megajax.parallel.rules import Rules

BATCH_SPEC = PartitionSpec(None, "data")


@dataclass(frozen=True)
class Runner:
    """Run forward and backward passes of global batches with these settings."""

    rules: Rules
    attention: str
    """Attention kernel: "xla", "cudnn" or "ring"."""
    remat: str | tuple[str, ...] = "none"
    """Value of `train.remat`."""
    dropout_seed: int | None = None
    """Seed of the dropout masks, or None without dropout."""
    chunks: int = 1
    """Number of chunks of layers per pipeline stage."""
    poison: bool = False
    """Whether to fill the pipeline's masked slots with NaN, which tests do."""

    def losses_and_gradients(self, model: Model, batch: Batch, step: jax.Array) -> tuple[Losses, Model]:
        """Return the losses of a global batch and the gradient of their objective.

        Args:
            model: weights in the compute dtype.
            batch: [M, B, ...] arrays of `Model.arrays`, and "weights" [M, B, S] fp32 of the token losses.
            step: number of the step, from which dropout masks follow.

        Returns:
            Losses as weighted sums, and fp32 gradients, sharded as the parameters are at rest.
        """

        def local(model: Model, batch: Batch, step: jax.Array) -> tuple[Losses, Model]:
            if self._stages > 1:
                losses, gradients = self._executor(model, batch, step).losses_and_gradients()
            else:
                losses, gradients = self._accumulate(model, batch, step)
            gradients = annotate(gradients, lambda _, leaf: self._reduce_over_data(leaf))
            return self._sum_over_data(losses), gradients

        specs = annotate(model, lambda _, leaf: self.rules.at_rest(logical_axes(leaf), MANUAL_AXES))
        return self._manual(local, model, (PartitionSpec(), specs))(model, batch, step)

    def losses(self, model: Model, batch: Batch) -> Losses:
        """Return the losses of a global batch from the forward pass alone, for evaluation."""

        def local(model: Model, batch: Batch, step: jax.Array) -> Losses:
            if self._stages > 1:
                return self._sum_over_data(self._executor(model, batch, step).losses())
            with jax.named_scope("microbatches"):
                each = jax.lax.map(lambda batch: model.losses(batch, self._context(model, batch, step)), batch)
            return self._sum_over_data(jax.tree.map(lambda loss: loss.sum(0), each))

        return self._manual(local, model, PartitionSpec())(model, batch, jnp.int32(0))

    def _sum_over_data(self, losses: Losses) -> Losses:
        return jax.tree.map(lambda loss: self._net.psum(loss, "data"), losses)

    @property
    def _stages(self) -> int:
        return self.rules.size("pipe")

    @property
    def _net(self) -> Collectives:
        return Collectives(self.rules.mesh)

    def _context(self, model: Model, batch: Batch, step: jax.Array) -> Context:
        seed = self.dropout_seed
        keys = None if seed is None else sample_keys(seed, step, batch["sample_ids"])
        return model.context(batch, MeshLayout(self.rules, self.attention), keys)

    def _executor(self, model: Model, batch: Batch, step: jax.Array) -> Executor:
        schedule = Interleaved1F1B(self._stages, self.chunks, batch["tokens"].shape[0])
        context_of = lambda microbatch: self._context(model, microbatch, step)  # noqa: E731
        return Executor(model, batch, schedule, self._net, context_of, remat_policy(self.remat), self.poison)

    def _accumulate(self, model: Model, batch: Batch, step: jax.Array) -> tuple[Losses, Model]:
        """Run the microbatches one after another, forward and backward, and sum up losses and gradients."""

        def differentiated(model: Model, batch: Batch) -> tuple[jax.Array, Losses]:
            losses = model.losses(batch, self._context(model, batch, step), remat_policy(self.remat))
            return objective(losses, model.config), losses

        def one(sums: Model, batch: Batch) -> tuple[Model, Losses]:
            (_, losses), gradients = jax.value_and_grad(differentiated, has_aux=True)(model, batch)
            sums = jax.tree.map(lambda a, g: a + g.astype(jnp.float32), sums, gradients)
            return self._at_rest(sums), losses

        zeros = jax.tree.map(lambda p: jnp.zeros(p.shape, jnp.float32), model)
        with jax.named_scope("microbatches"):
            gradients, each = jax.lax.scan(one, self._at_rest(zeros), batch)
        return jax.tree.map(lambda loss: loss.sum(0), each), gradients

    def _at_rest(self, tree: Model) -> Model:
        # Without this the compiler all-reduces whole weight gradients over fsdp instead of reduce-scattering them.
        specs = annotate(tree, lambda _, leaf: self.rules.at_rest(logical_axes(leaf), AUTO_AXES))
        return jax.tree.map(jax.lax.with_sharding_constraint, tree, specs)

    def _reduce_over_data(self, leaf: Any) -> jax.Array:
        """Sum a gradient over `data`; where `data` cuts it at rest, keep only this device's part."""
        if (dim := self._cut_over_data(leaf)) is None:
            return self._net.psum(leaf[...], "data")
        # Here `data` cuts again what `fsdp` has cut; at rest `data` cuts first, so devices exchange pieces.
        scatter = lambda x: self._net.swap_order(self._net.reduce_scatter(x, "data", dim), "data", "fsdp")  # noqa: E731
        return self._on_each_device(scatter, leaf)

    def _gather_over_data(self, leaf: Any) -> jax.Array:
        """Return a weight for the computation, gathered over `data` if it is cut so at rest."""
        if (dim := self._cut_over_data(leaf)) is None:
            return leaf[...]
        turn = lambda x: self._net.swap_order(x, "data", "fsdp", back=True)  # noqa: E731
        return self._on_each_device(lambda x: self._net.all_gather(turn(x), "data", dim), leaf)

    def _cut_over_data(self, leaf: Any) -> int | None:
        """Return the dimension that is cut over `data` at rest, if any."""
        cuts = [self.rules.rule(axis).at_rest if axis else () for axis in logical_axes(leaf)]
        return next((dim for dim, cut in enumerate(cuts) if "data" in cut), None)

    def _on_each_device(self, fn: Callable[[jax.Array], jax.Array], leaf: Any) -> jax.Array:
        """Apply `fn` to each device's part; without this the compiler gathers what `tensor` and `fsdp` cut."""
        spec = self.rules.at_rest(logical_axes(leaf), AUTO_AXES)
        local = jax.shard_map(fn, in_specs=spec, out_specs=spec, axis_names=set(AUTO_AXES), check_vma=False)
        return local(leaf[...])

    def _manual(self, fn: Callable[..., Any], model: Model, out_specs: Any) -> Callable[..., Any]:
        """Run `fn` in a region that is manual over `MANUAL_AXES`, on the model gathered over `data`."""
        specs = annotate(model, lambda _, leaf: self.rules.at_rest(logical_axes(leaf), MANUAL_AXES))

        def run(model: Model, *rest: Any) -> Any:
            return fn(annotate(model, lambda _, leaf: self._gather_over_data(leaf)), *rest)

        return jax.shard_map(
            run,
            mesh=self.rules.mesh,
            in_specs=(specs, BATCH_SPEC, PartitionSpec()),
            out_specs=out_specs,
            axis_names=set(MANUAL_AXES),
            check_vma=False,
        )
