"""Embedding lookup and cross-entropy over a vocabulary sharded over `tensor`.

Both run in a fully manual region with hand-written gradients: XLA's partitioner cannot split a gather over two automatic
axes, and autodiff through `psum` would count cotangents once per device. What is sent (elements per microbatch, t = tensor):

    lookup          forward  reduce-scatter (or all-reduce) [B, S, D] over tensor      backward  all-gather of the same
    cross-entropy   forward  all-gather [B, S, D], three reductions of [tokens] (max, target logit, sum of exponentials)
                             and the reduce-scatter of dx; backward nothing (see `models.cross_entropy`)
    both            the table gathered over fsdp, its gradient reduce-scattered over fsdp and summed over context

Shapes: B batch, S sequence, D embed, V vocabulary rows, T tokens of this device.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from megajax.config.parallel import AXES
from megajax.models.cross_entropy import LinearLoss, chunked_loss, token_losses
from megajax.parallel.collectives import Collectives
from megajax.parallel.mesh import MANUAL_AXES
from megajax.parallel.rules import Rules


class Vocabulary:
    """Lookup and loss for one mesh, to be called inside the region that is manual over `MANUAL_AXES`."""

    def __init__(self, rules: Rules) -> None:
        """Derive how each array enters the manual region."""
        self.rules = rules
        self.net = Collectives(rules.mesh)
        self.residual = rules.in_compute(("batch", "residual_sequence", None))
        self.tokens = rules.in_compute(("batch", "sequence"))

    def lookup(self, table: jax.Array, ids: jax.Array, rows: str) -> jax.Array:
        """Rows `ids` [B, S] of `table` [V, D] -> residual stream [B, S, D]; `rows` names the table's first dim."""
        sharded = bool(self.rules.rule(rows).in_compute)
        at_rest = self.rules.at_rest((rows, "embed"), MANUAL_AXES)
        # Rows found everywhere are looked up where the residual stream wants them; sharded rows where all of S is.
        ids_spec = self.tokens if sharded else PartitionSpec(*self.residual[:2])

        def mine(table_rows: int, ids: jax.Array) -> tuple[jax.Array, jax.Array]:
            """Local row numbers, and which of the ids are among this device's rows."""
            local = ids - (self.net.index("tensor") * table_rows if sharded else 0)
            return jnp.clip(local, 0, table_rows - 1), (local >= 0) & (local < table_rows)

        def forward(table: jax.Array, ids: jax.Array) -> jax.Array:
            local, found = mine(table.shape[0], ids)
            table = self.net.all_gather(table, "fsdp", dim=1)
            if not sharded:
                return table[local]
            return self._leave(jnp.where(found[..., None], table[local], 0))

        def backward(ids: jax.Array, dx: jax.Array) -> jax.Array:
            local, found = mine(rows_here, ids)
            if sharded:
                dx = jnp.where(found[..., None], self._enter(dx), 0)
            dtable = jnp.zeros((rows_here, table.shape[1]), jnp.float32).at[local].add(dx.astype(jnp.float32))
            if not sharded and self.rules.sequence_parallel:
                dtable = self.net.psum(dtable, "tensor")
            return self._table_gradient(dtable).astype(table.dtype)

        rows_here = table.shape[0] // (self.rules.size(*self.rules.rule(rows).in_compute))
        forward_manual = self._manual(forward, (at_rest, ids_spec), self.residual)
        backward_manual = self._manual(backward, (ids_spec, self.residual), at_rest)

        @jax.custom_vjp
        def look(table: jax.Array, ids: jax.Array) -> jax.Array:
            return forward_manual(table, ids)

        look.defvjp(
            lambda table, ids: (forward_manual(table, ids), ids), lambda ids, dx: (backward_manual(ids, dx), None)
        )
        return look(table, ids)

    def cross_entropy(
        self, x: jax.Array, head: jax.Array, labels: jax.Array, weights: jax.Array, vocab_size: int
    ) -> jax.Array:
        """Sum over this replica's tokens of weight x cross-entropy; shapes as in `models.cross_entropy`."""
        at_rest = self.rules.at_rest(("vocab", "embed"), MANUAL_AXES)

        def run(x: Any, head: Any, labels: Any, weights: Any, *, with_gradients: bool) -> LinearLoss:
            x, head = self._enter(x), self.net.all_gather(head, "fsdp", dim=1)
            first = self.net.index("tensor") * head.shape[0]
            loss_fn = partial(
                token_losses,
                columns=first + jnp.arange(head.shape[0]),
                vocab_size=vocab_size,
                psum=lambda a: self.net.psum(a, "tensor"),
                pmax=lambda a: self.net.pmax(a, "tensor"),
            )
            flat = x.reshape(-1, x.shape[-1])
            out = chunked_loss(flat, head, labels.reshape(-1), weights.reshape(-1), loss_fn, with_gradients)
            loss = self.net.psum(out.loss, "fsdp", "context")
            if not with_gradients:
                return LinearLoss(loss, x[:, :0], head[:0].astype(jnp.float32))
            return LinearLoss(loss, self._leave(out.dx.reshape(x.shape)), self._table_gradient(out.dhead))

        in_specs = (self.residual, at_rest, self.tokens, self.tokens)
        out_specs = LinearLoss(PartitionSpec(), self.residual, at_rest)
        evaluate = self._manual(lambda *args: run(*args, with_gradients=False).loss, in_specs, PartitionSpec())
        differentiate = self._manual(partial(run, with_gradients=True), in_specs, out_specs)

        @jax.custom_vjp
        def loss(x: jax.Array, head: jax.Array, labels: jax.Array, weights: jax.Array) -> jax.Array:
            return evaluate(x, head, labels, weights)

        def forward(*args: jax.Array) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
            out = differentiate(*args)
            return out.loss, (out.dx, out.dhead.astype(head.dtype))

        def backward(gradients: tuple[jax.Array, jax.Array], cotangent: jax.Array) -> tuple[Any, ...]:
            return *((g * cotangent).astype(g.dtype) for g in gradients), None, None

        loss.defvjp(forward, backward)
        return loss(x, head, labels, weights)

    def _enter(self, x: jax.Array) -> jax.Array:
        """Residual stream -> all of the sequence of this context shard."""
        return self.net.all_gather(x, "tensor", dim=1) if self.rules.sequence_parallel else x

    def _leave(self, x: jax.Array) -> jax.Array:
        """Partial sums over `tensor` -> residual stream."""
        if self.rules.sequence_parallel:
            return self.net.reduce_scatter(x, "tensor", dim=1)
        return self.net.psum(x, "tensor")

    def _table_gradient(self, dtable: jax.Array) -> jax.Array:
        """Sum a table's gradient over the devices that saw other tokens, leaving it sharded as it lies at rest."""
        return self.net.reduce_scatter(self.net.psum(dtable, "context"), "fsdp", dim=1)

    def _manual(self, fn: Callable[..., Any], in_specs: Any, out_specs: Any) -> Callable[..., Any]:
        axes = set(AXES) - set(MANUAL_AXES)
        return jax.shard_map(fn, in_specs=in_specs, out_specs=out_specs, axis_names=axes, check_vma=False)
