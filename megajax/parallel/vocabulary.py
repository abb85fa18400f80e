"""Embedding lookup and cross-entropy over a vocabulary sharded over `pipe` and `tensor`.

All pipeline stages share the work of both, so that no stage waits while another one computes them.

Both run in a fully manual region with hand-written gradients: XLA's partitioner cannot split a gather over two
automatic axes, and automatic differentiation through `psum` would count cotangents once per device. Over `tensor` a
microbatch sends:

    lookup          forward  reduce-scatter of [B, S, D] (all-reduce without sequence parallelism), whatever the number
                             of tables; backward  all-gather of the same
    cross-entropy   forward  all-gather of [B, S, D], three reductions of [tokens] (maximum, target logit, sum of
                             exponentials), reduce-scatter of dx; backward  nothing (see `models.losses`)

Over `pipe` the results of the table above are summed; over `fsdp` every table is gathered and its gradient
reduce-scattered; over `expert` and `context` gradients are summed.

Shapes: B batch, S sequence, D embed, V vocabulary rows, T tokens of this device.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from megajax.models.layout import Table
from megajax.models.losses import Gradients, Loss, chunked_loss, differentiated, token_losses
from megajax.parallel.collectives import Collectives
from megajax.parallel.mesh import AUTO_AXES
from megajax.parallel.rules import Rules


class Vocabulary:
    """Embedding lookup and loss on one mesh, inside the region that is manual over `MANUAL_AXES`."""

    def __init__(self, rules: Rules) -> None:
        """Derive the specs with which each array enters the manual region."""
        self.rules = rules
        self.net = Collectives(rules.mesh)
        self.residual = rules.in_compute(("batch", "residual_sequence", None))
        self.tokens = rules.in_compute(("batch", "sequence"))

    def lookup(self, tables: list[Table]) -> jax.Array:
        """Look up the rows of the ids [B, S] in each table, and add them up into the residual stream [B, S, D].

        Every device adds up the rows that it holds; one reduction over `tensor` serves all tables.
        """
        at_rest = [self.rules.at_rest((rows, "embed"), AUTO_AXES) for _, _, rows in tables]
        ids_specs = [self.tokens] * len(tables)
        cuts = [self.rules.rule(rows).in_compute for _, _, rows in tables]
        # Inside the region that is manual over `pipe` a table has this stage's rows already.
        heights = [
            weights.shape[0] // self.rules.size(*(axis for axis in cut if axis in AUTO_AXES))
            for cut, (weights, _, _) in zip(cuts, tables, strict=True)
        ]
        columns, dtype = tables[0][0].shape[1], tables[0][0].dtype

        def mine(cut: tuple[str, ...], height: int, ids: jax.Array) -> tuple[jax.Array, jax.Array]:
            """Return the local row of each id, and whether it is among this device's rows, [B, S, 1]."""
            local = ids - self.net.index(*cut) * height
            return jnp.clip(local, 0, height - 1), ((local >= 0) & (local < height))[..., None]

        def forward(*arrays: jax.Array) -> jax.Array:
            rows = []
            for cut, weights, ids in zip(cuts, arrays[: len(tables)], arrays[len(tables) :], strict=True):
                local, found = mine(cut, weights.shape[0], ids)
                for axis in {"pipe", "tensor"}.difference(cut):
                    found &= self.net.index(axis) == 0  # all devices along it hold these rows: one counts
                rows.append(jnp.where(found, self._gathered(weights).T[local], 0))
            return self._leave(functools.reduce(jnp.add, rows))

        def backward(dx: jax.Array, *all_ids: jax.Array) -> list[jax.Array]:
            # Without this barrier the compiler would create the zeros, which depend on nothing, long before there is a
            # gradient, and share them.
            dx, zero = jax.lax.optimization_barrier((self._enter(dx).astype(jnp.float32), jnp.float32(0)))
            gradients = []
            for cut, height, ids in zip(cuts, heights, all_ids, strict=True):
                local, found = mine(cut, height, ids)
                gradient = jnp.full((height, columns), zero).at[local].add(jnp.where(found, dx, 0))
                gradients.append(self._table_gradient(gradient).astype(dtype))
            return gradients

        forward_manual = self._manual(forward, (*at_rest, *ids_specs), self.residual)
        backward_manual = self._manual(backward, (self.residual, *ids_specs), at_rest)

        @jax.custom_vjp
        def look(weights: list[jax.Array], ids: list[jax.Array]) -> jax.Array:
            return forward_manual(*weights, *ids)

        look.defvjp(
            lambda weights, ids: (forward_manual(*weights, *ids), ids),
            lambda ids, dx: (backward_manual(dx, *ids), None),
        )
        return look([weights for weights, _, _ in tables], [ids for _, ids, _ in tables])

    def cross_entropy(
        self,
        x: jax.Array,
        head: jax.Array,
        labels: jax.Array,
        weights: jax.Array,
        vocab_size: int,
        bias: jax.Array | None = None,
        softcap: float | None = None,
    ) -> jax.Array:
        """Return this replica's sum over tokens of weight x cross-entropy, with shapes as in `models.losses`."""
        at_rest = self.rules.at_rest(("vocab", "embed"), AUTO_AXES)
        bias_at_rest = self.rules.at_rest(("vocab",), AUTO_AXES)
        run = partial(self._loss, vocab_size=vocab_size, softcap=softcap)
        in_specs = (self.residual, at_rest, self.tokens, self.tokens, bias_at_rest)
        of_gradients: Any = Gradients(self.residual, at_rest, bias_at_rest)  # type: ignore[arg-type]
        evaluate = self._manual(lambda *args: run(*args, with_gradients=False)[0], in_specs, PartitionSpec())
        both = self._manual(partial(run, with_gradients=True), in_specs, (PartitionSpec(), of_gradients))
        return differentiated(evaluate, both)(x, head, labels, weights, bias)

    def _loss(
        self,
        x: jax.Array,
        head: jax.Array,
        labels: jax.Array,
        weights: jax.Array,
        bias: jax.Array | None,
        *,
        vocab_size: int,
        softcap: float | None,
        with_gradients: bool,
    ) -> Loss:
        """Compute the loss on this device's shards, summed over the mesh, and its gradients, which lie as at rest."""
        x, cut, height = self._enter(x), self.rules.rule("vocab").in_compute, head.shape[0]
        if scattered := self.rules.size("fsdp") > 1:
            head = self._gathered(head)
        loss_fn = partial(
            token_losses,
            columns=self.net.index(*cut) * height + jnp.arange(height),
            vocab_size=vocab_size,
            psum=lambda a: self.net.psum(a, *cut),
            pmax=lambda a: self.net.pmax(a, *cut),
        )
        how: Any = {"with_gradients": with_gradients, "softcap": softcap, "transposed": scattered}
        loss, gradients = chunked_loss(x, head, labels, weights, bias, loss_fn=loss_fn, **how)
        loss = self.net.psum(loss, "fsdp", "expert", "context")
        if gradients is None:
            return loss, None
        dbias = None if gradients.dbias is None else self.net.psum(gradients.dbias, "fsdp", "expert", "context")
        dx, dhead = self._leave(gradients.dx), gradients.dhead
        if scattered:
            # No other operation waits for the gradient of the table: unscattered, the compiler would keep all of it,
            # fp32 [D, V], while the layers run backward. The sums stand outside the barrier: the compiler takes them
            # once a step.
            dx, dhead = jax.lax.optimization_barrier((dx, self.net.reduce_scatter(dhead, "fsdp", dim=0)))
            dhead = dhead.T
        return loss, Gradients(dx, self.net.psum(dhead, "expert", "context"), dbias)

    def _enter(self, x: jax.Array) -> jax.Array:
        """Gather the residual stream over `tensor` into the whole sequence of this context shard."""
        return self.net.all_gather(x, "tensor", dim=1) if self.rules.sequence_parallel else x

    def _leave(self, x: jax.Array) -> jax.Array:
        """Sum partial sums over `tensor` and `pipe` into the residual stream, the same on every stage."""
        if not self.rules.sequence_parallel:
            return self.net.psum(x, "tensor", "pipe")
        return self.net.psum(self.net.reduce_scatter(x, "tensor", dim=1), "pipe")

    def _gathered(self, table: jax.Array) -> jax.Array:
        """Gather a table [V, D] over `fsdp` as [D, V], its layout in memory after the gather; all uses share one
        gather.
        """
        return self.net.all_gather(table.T, "fsdp", dim=0)

    def _table_gradient(self, dtable: jax.Array) -> jax.Array:
        """Sum a table's gradient over the devices with other tokens, and leave it sharded as at rest."""
        return self.net.psum(self.net.reduce_scatter(dtable, "fsdp", dim=1), "expert", "context")

    def _manual(self, fn: Callable[..., Any], in_specs: Any, out_specs: Any) -> Callable[..., Any]:
        return jax.shard_map(fn, in_specs=in_specs, out_specs=out_specs, axis_names=set(AUTO_AXES), check_vma=False)
