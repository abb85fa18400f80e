"""Forward and backward of one global batch on the mesh.

One `jax.shard_map`, manual over `pipe` and `data` and automatic over the rest: gradients add up locally over the
microbatches and cross `data` once per step and parameter. Left to the compiler, each microbatch would be reduced.

Shapes: M microbatches, B samples of a microbatch over all replicas, S sequence.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from megajax.models.dropout import sample_keys
from megajax.models.gpt import Gpt
from megajax.models.parameters import annotate, logical_axes
from megajax.parallel.collectives import Collectives
from megajax.parallel.layout import MeshLayout
from megajax.parallel.mesh import MANUAL_AXES
from megajax.parallel.remat import remat_policy
from megajax.parallel.rules import Rules

Batch = dict[str, jax.Array]
BATCH_SPEC = PartitionSpec(None, "data")


def loss_and_gradients(
    rules: Rules, attention: str, remat: str | tuple[str, ...], dropout_seed: int | None
) -> Callable[[Gpt, Batch, jax.Array, jax.Array], tuple[jax.Array, Gpt]]:
    """Build f(model, batch, weights, step) -> (loss sum, gradient sum).

    Args:
        rules: sharding rules bound to the mesh.
        attention: kernel, "xla" or "cudnn".
        remat: `train.remat`.
        dropout_seed: seed of the dropout masks; None trains without dropout.

    Returns:
        A function of the model in its compute dtype, the batch ([M, B, S] arrays of `megajax.data.batch`), fp32 loss
        weights [M, B, S] and the step number. It returns the weighted sum of token losses (fp32 scalar) and its
        gradient (fp32, sharded as the parameters are).
    """
    layout = MeshLayout(rules, attention)
    net = Collectives(rules.mesh)
    policy = remat_policy(remat)

    def microbatch_loss(model: Gpt, batch: Batch, weights: jax.Array, step: jax.Array) -> jax.Array:
        keys = None if dropout_seed is None else sample_keys(dropout_seed, step, batch["sample_ids"])
        return model.loss(batch, weights, model.context(batch, layout, keys), policy)

    def local(model: Gpt, batch: Batch, weights: jax.Array, step: jax.Array) -> tuple[jax.Array, Gpt]:
        def accumulate(carry: tuple[jax.Array, Gpt], inputs: tuple[Batch, jax.Array]) -> tuple[Any, None]:
            total, sums = carry
            loss, gradients = jax.value_and_grad(microbatch_loss)(model, *inputs, step)
            sums = jax.tree.map(lambda a, g: a + g.astype(jnp.float32), sums, gradients)
            return (total + loss, at_rest(sums)), None

        def at_rest(tree: Gpt) -> Gpt:
            # Without this the compiler all-reduces whole weight gradients over fsdp instead of reduce-scattering them.
            specs = annotate(tree, lambda _, leaf: rules.at_rest(logical_axes(leaf), MANUAL_AXES))
            return jax.tree.map(jax.lax.with_sharding_constraint, tree, specs)

        zeros = jax.tree.map(lambda p: jnp.zeros(p.shape, jnp.float32), model)
        (loss, gradients), _ = jax.lax.scan(accumulate, (jnp.float32(0), at_rest(zeros)), (batch, weights))
        return net.psum(loss, "data"), jax.tree.map(lambda g: net.psum(g, "data"), gradients)

    return jax.shard_map(
        local,
        mesh=rules.mesh,
        in_specs=(PartitionSpec(), BATCH_SPEC, BATCH_SPEC, PartitionSpec()),
        out_specs=PartitionSpec(),
        axis_names=set(MANUAL_AXES),
        check_vma=False,
    )


def loss_only(rules: Rules, attention: str) -> Callable[[Gpt, Batch, jax.Array], jax.Array]:
    """Build f(model, batch, weights) -> loss sum over the batch, without dropout: the forward pass of evaluation."""
    layout = MeshLayout(rules, attention)
    net = Collectives(rules.mesh)

    def local(model: Gpt, batch: Batch, weights: jax.Array) -> jax.Array:
        def add(total: jax.Array, inputs: tuple[Batch, jax.Array]) -> tuple[jax.Array, None]:
            batch, weights = inputs
            return total + model.loss(batch, weights, model.context(batch, layout, None)), None

        return net.psum(jax.lax.scan(add, jnp.float32(0), (batch, weights))[0], "data")

    return jax.shard_map(
        local,
        mesh=rules.mesh,
        in_specs=(PartitionSpec(), BATCH_SPEC, BATCH_SPEC),
        out_specs=PartitionSpec(),
        axis_names=set(MANUAL_AXES),
        check_vma=False,
    )
