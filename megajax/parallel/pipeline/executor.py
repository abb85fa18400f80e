"""Interleaved 1F1B as three `lax.scan`s over ticks, inside the region that is manual over `pipe`.

Every stage runs the same program. A forward tick calls `jax.vjp` on the layers of a chunk, one after another, and
stores the leaves of the closures that it returns in a ring buffer. The backward tick of that slot traces the same
calls, puts the stored leaves in their places, pulls the cotangent back and adds the gradients of each layer to their
sums at once. So exactly the activations that the rematerialisation policy names are stored, and all others are computed
again. Leaves that the backward tick has anyway (weights, rotary angles, dropout keys) are not stored.

Slots outside the schedule compute on garbage, in time that is bubble anyway, and their results are masked: nothing
branches by device. All stages compute embedding and loss together, in ticks that follow from the tick's number alone.
Over `pipe` a steady tick sends [B, S, D] one stage forward and one stage back, and sums it once around an embedding or
a loss.

Shapes: P stages, v chunks, n layers per chunk, M microbatches, B samples of a microbatch on this replica, S sequence, D
embed, p kinds of layers in a pattern.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from megajax.models.block import Block, Remat, keep_all, run_block
from megajax.models.context import Context
from megajax.models.losses import Losses, add, coefficients, objective
from megajax.models.model import Batch, Model
from megajax.models.parameters import named_leaves
from megajax.parallel.collectives import Collectives
from megajax.parallel.pipeline.schedule import Index, Interleaved1F1B

Leaves = list[jax.Array]
Backward = tuple[jax.Array, Leaves]
"""Values that the backward pass of a chunk carries from layer to layer: gradient [B, S, D] of x, and gradient sums."""
_take = partial(jax.lax.dynamic_index_in_dim, keepdims=False)
_put = jax.lax.dynamic_update_index_in_dim


class Flow(NamedTuple):
    """The state that one stage carries from tick to tick."""

    activation: jax.Array
    """Activation [B, S, D] from the stage before; after this tick's forward slot, the output of that slot."""
    gradient: jax.Array
    """Gradient [B, S, D] from the stage after; after this tick's backward slot, the gradient of its input."""
    ring: list[Leaves]
    """Buffers [slots, n / p, ...], one list per place in a pattern, that hold what the forward slots in flight have
    stored.

    Masked slots write only to places that are not in use.
    """
    block_sums: Leaves
    """Gradient sums of this stage's layers, [v n, ...] fp32 each."""
    other_sums: Leaves
    """Gradient sums of all weights outside the blocks, fp32.

    Every stage has all of them, but only its own rows of the vocabulary.
    """
    losses: Losses
    """Sums of the head's losses, the same on every stage."""
    inside: Losses
    """Sums of the losses that arise in this stage's layers."""


class Executor:
    """Pass once over the microbatches of a step, on this device's layers and samples."""

    def __init__(
        self,
        model: Model,
        batch: Batch,
        schedule: Interleaved1F1B,
        net: Collectives,
        context_of: Callable[[Batch], Context],
        remat: Remat = keep_all,
        poison: bool = False,
    ) -> None:
        """Prepare a pass.

        Args:
            model: weights in the compute dtype; block leaves [n, ...], or [v, n, ...] with several chunks.
            batch: arrays [M, B, ...], among them "weights" [M, B, S] of the token losses.
            schedule: ticks and slots of the pipeline.
            net: collectives of the mesh.
            context_of: function from a microbatch to the context in which blocks run.
            remat: rematerialisation policy of a layer.
            poison: whether to fill masked slots with NaN, which shows that nothing of them is used.
        """
        self.batch, self.schedule, self.net = batch, schedule, net
        self.context_of, self.remat, self.poison = context_of, remat, poison
        self.stage = net.index("pipe")
        self.parts = Parts(model, schedule.chunks)

    def losses_and_gradients(self) -> tuple[Losses, Model]:
        """Return the sums of the losses and of the objective's gradients (fp32), before any reduction over `data`."""
        s = self.schedule
        steady, cooldown = s.warmup_ticks, s.warmup_ticks + s.steady_ticks
        flow = self._start(training=True)
        flow = self._ticks("warmup", flow, range(steady), self._forward)
        flow = self._ticks("steady", flow, range(steady, cooldown), self._forward, self._head, self._backward)
        flow = self._ticks("cooldown", flow, range(cooldown, cooldown + s.cooldown_ticks), self._backward)
        return self._all_losses(flow), self.parts.join(flow.block_sums, flow.other_sums)

    def losses(self) -> Losses:
        """Return the sums of the losses of a forward pass alone."""
        ticks = range(self.schedule.warmup_ticks + self.schedule.steady_ticks)
        return self._all_losses(self._ticks("forward", self._start(training=False), ticks, self._advance, self._score))

    def _all_losses(self, flow: Flow) -> Losses:
        return add(flow.losses, jax.tree.map(lambda loss: self.net.psum(loss, "pipe"), flow.inside))

    def _start(self, training: bool) -> Flow:
        x = jax.eval_shape(lambda: self._embed(0))
        activation = jnp.zeros(x.shape, x.dtype)
        zeros = lambda tree: jax.tree.map(lambda a: jnp.zeros(a.shape, jnp.float32), tree)  # noqa: E731
        losses = zeros(jax.eval_shape(lambda: self._head_losses(self.parts.others, activation, 0)))
        _, inside, saved = jax.eval_shape(lambda: self._run(0, 0, activation))
        inside = zeros(inside)
        if not training:
            return Flow(activation, activation, [], [], [], losses, inside)
        ring = jax.tree.map(lambda a: jnp.zeros((self.schedule.ring_slots, *a.shape), a.dtype), saved)
        sums = zeros(self.parts.block_leaves), zeros(self.parts.others)
        return Flow(activation, activation, ring, *sums, losses, inside)

    def _ticks(self, phase: str, flow: Flow, ticks: range, *works: Callable[[jax.Array, Flow], Flow]) -> Flow:
        """Run the ticks of a phase under a name for profiles, and send results to the neighbours at the end of each
        tick.
        """

        def tick(flow: Flow, t: jax.Array) -> tuple[Flow, None]:
            for work in works:
                flow = work(t, flow)
            if self._backward in works:
                flow = flow._replace(gradient=self.net.shift(flow.gradient, "pipe", -1))
            if works[0] != self._backward:
                flow = flow._replace(activation=self.net.shift(flow.activation, "pipe", +1))
            return flow, None

        with jax.named_scope(f"{phase}_ticks"):
            return jax.lax.scan(tick, flow, jnp.arange(ticks.start, ticks.stop))[0] if ticks else flow

    def _forward(self, t: jax.Array, flow: Flow) -> Flow:
        slot = self.schedule.forward(t, self.stage)
        activation, inside, saved = self._run(slot.chunk, slot.microbatch, self._input(t, flow))
        ring = jax.tree.map(lambda ring, leaf: _put(ring, leaf, slot.ring_slot, 0), flow.ring, saved)
        return flow._replace(activation=activation, ring=ring, inside=_add_if(slot.valid, flow.inside, inside))

    def _advance(self, t: jax.Array, flow: Flow) -> Flow:
        slot = self.schedule.forward(t, self.stage)
        activation, inside, _ = self._run(slot.chunk, slot.microbatch, self._input(t, flow))
        return flow._replace(activation=activation, inside=_add_if(slot.valid, flow.inside, inside))

    def _input(self, t: jax.Array, flow: Flow) -> jax.Array:
        """Return the input of this tick's forward slot.

        On stage 0, chunk 0 it is the embedding of a new microbatch, otherwise the activation that was received.
        """
        slot = self.schedule.forward(t, self.stage)
        entering = self.schedule.entering(t)
        nothing = jnp.zeros_like(flow.activation)
        new = jax.lax.cond(entering.valid, self._embed, lambda _: nothing, entering.microbatch)
        x = jnp.where((self.stage == 0) & (slot.chunk == 0), new, flow.activation)
        return jnp.where(slot.valid, x, jnp.nan) if self.poison else x

    def _head(self, t: jax.Array, flow: Flow) -> Flow:
        """Add the losses of the microbatch that leaves the last stage, and their gradients."""
        leaving = self.schedule.leaving(t)

        def run(flow: Flow) -> Flow:
            x = self._broadcast(flow.activation, from_stage=self.schedule.stages - 1)
            head = jax.value_and_grad(self._head_objective, argnums=(0, 1), has_aux=True)
            (_, losses), (sums, dx) = head(self.parts.others, x, leaving.microbatch)
            gradient = jnp.where(self.stage == self.schedule.stages - 1, dx, flow.gradient)
            sums = _add(flow.other_sums, sums)
            return flow._replace(losses=add(flow.losses, losses), gradient=gradient, other_sums=sums)

        return jax.lax.cond(leaving.valid, run, lambda flow: flow, flow)

    def _score(self, t: jax.Array, flow: Flow) -> Flow:
        """Add the losses of the microbatch that leaves the last stage, without gradients."""
        leaving = self.schedule.leaving(t)

        def run(flow: Flow) -> Flow:
            x = self._broadcast(flow.activation, from_stage=self.schedule.stages - 1)
            losses = self._head_losses(self.parts.others, x, leaving.microbatch)
            return flow._replace(losses=add(flow.losses, losses))

        return jax.lax.cond(leaving.valid, run, lambda flow: flow, flow)

    def _backward(self, t: jax.Array, flow: Flow) -> Flow:
        slot = self.schedule.backward(t, self.stage)
        _, context = self._microbatch(slot.microbatch)
        stored = jax.tree.map(lambda ring: _take(ring, slot.ring_slot, 0), flow.ring)
        cotangent = jnp.where(slot.valid, flow.gradient, jnp.nan) if self.poison else flow.gradient
        factors = self._factors(flow.inside)

        # The gradients of a layer are added to their sums at once: stacked up by the loop they would need as much
        # memory as the weights, and as much again for the zeros that the stacks start from.
        def layer(of_kind: Context, i: jax.Array, saved: Leaves, dx: jax.Array, sums: Leaves) -> Backward:
            gradients, dx = self._call(slot.chunk, i, of_kind, jnp.zeros_like(dx)).pull(saved)((dx, factors))
            row = slot.chunk * self.parts.layers + i

            def add(total: jax.Array, g: jax.Array) -> jax.Array:
                # The sums are read only after the gradient is there: the compiler would otherwise read, and hold, those
                # of all weights early.
                # The indexed sum is made in place; taking the row out and putting it back would copy it.
                g, at = jax.lax.optimization_barrier((g, row))
                return total.at[at].add(jnp.where(slot.valid, g, 0).astype(jnp.float32))

            return dx, [add(*pair) for pair in zip(sums, jax.tree.leaves(gradients), strict=True)]

        def pattern(flow: Backward, inputs: tuple[jax.Array, list[Leaves]]) -> tuple[Backward, None]:
            first, saved = inputs
            for place, of_kind in reversed([*enumerate(context.of_kinds)]):
                flow = layer(of_kind, first + place, saved[place], *flow)
            return flow, None

        with jax.named_scope("transpose(layers)"):  # as JAX names the backward pass of a loop that it differentiates
            inputs = (self._patterns(context), stored)
            (dx, sums), _ = jax.lax.scan(pattern, (cotangent, flow.block_sums), inputs, reverse=True)
        flow = flow._replace(gradient=dx, block_sums=sums)
        arriving = self.schedule.embedding_backward(t)

        def embedding(flow: Flow) -> Flow:
            dx = self._broadcast(flow.gradient, from_stage=0)
            _, pull = jax.vjp(partial(self._embed, arriving.microbatch), self.parts.others)
            return flow._replace(other_sums=_add(flow.other_sums, pull(dx)[0]))

        return jax.lax.cond(arriving.valid, embedding, lambda flow: flow, flow)

    def _broadcast(self, x: jax.Array, from_stage: int) -> jax.Array:
        return self.net.psum(jnp.where(self.stage == from_stage, x, 0), "pipe")

    def _microbatch(self, number: jax.Array | int) -> tuple[Batch, Context]:
        batch = {name: jax.lax.dynamic_index_in_dim(a, number, keepdims=False) for name, a in self.batch.items()}
        return batch, self.context_of(batch)

    def _embed(self, microbatch: jax.Array | int, others: Leaves | None = None) -> jax.Array:
        return self.parts.model(others or self.parts.others).embed(*self._microbatch(microbatch))

    def _head_losses(self, others: Leaves, x: jax.Array, microbatch: jax.Array | int) -> Losses:
        return self.parts.model(others).head_losses(x, *self._microbatch(microbatch))

    def _head_objective(self, others: Leaves, x: jax.Array, microbatch: jax.Array) -> tuple[jax.Array, Losses]:
        losses = self._head_losses(others, x, microbatch)
        return objective(losses, self.parts.config), losses

    def _factors(self, losses: Losses) -> Losses:
        """Return the factor of each loss in the objective, which is the cotangent of the losses."""
        factors = coefficients(self.parts.config)
        return {name: jnp.float32(factors[name]) for name in losses}

    def _run(self, chunk: Index, microbatch: Index, x: jax.Array) -> tuple[jax.Array, Losses, list[Leaves]]:
        """Run one chunk of this stage on one microbatch; each turn of the scan runs a whole pattern of p kinds of
        layers.

        Returns:
            The output [B, S, D], the sums over the layers of the losses that arise inside, and for each kind the leaves
            stored for the backward passes of its layers, [n / p, ...] each.
        """
        _, context = self._microbatch(microbatch)

        def pattern(x: jax.Array, first: jax.Array) -> tuple[jax.Array, tuple[Losses, list[Leaves]]]:
            inside, saved = [], []
            for place, of_kind in enumerate(context.of_kinds):
                call = self._call(chunk, first + place, of_kind, x)
                x, losses = call.output
                inside.append(losses)
                saved.append(call.saved)
            return x, (jax.tree.map(lambda *losses: jnp.stack(losses), *inside), saved)

        with jax.named_scope("layers"):  # the loop's name in profiles and compiled programs
            x, (losses, saved) = jax.lax.scan(pattern, x, self._patterns(context))
        return x, jax.tree.map(lambda loss: loss.reshape(-1).sum(), losses), saved

    def _patterns(self, context: Context) -> jax.Array:
        """Return the places [n / p] where a pattern of p kinds begins in a chunk, which consists of whole patterns."""
        return jnp.arange(0, self.parts.layers, len(context.of_kinds))

    def _call(self, chunk: Index, i: jax.Array, context: Context, x: jax.Array) -> Call:
        """Run the i-th layer of a chunk in the context of its kind, so that it can be differentiated."""
        block = self.parts.layer(chunk, i)
        number = (chunk * self.schedule.stages + self.stage) * self.parts.layers + i
        output, pull = jax.vjp(self.remat(lambda block, x: run_block(context, x, block, number)), block, x)
        known = (block, number, context.segment_ids, context.kinds, context.keys, context.weights)
        return Call(output, pull, known=jax.tree.leaves(known))


class Call:
    """Split a differentiated call into values to store for its backward pass and values that are at hand there."""

    def __init__(self, output: tuple[jax.Array, Losses], pull: Any, known: Leaves) -> None:
        """Split the leaves of `pull`; those at hand, `known`, are recognised by identity."""
        self.output = output
        self._leaves, self._tree = jax.tree.flatten(pull)
        self._stored = [not any(leaf is other for other in known) for leaf in self._leaves]

    @property
    def saved(self) -> Leaves:
        """Return the leaves that have to be stored."""
        return [leaf for leaf, stored in zip(self._leaves, self._stored, strict=True) if stored]

    def pull(self, saved: Leaves) -> Callable[[tuple[jax.Array, Losses]], tuple[Block, jax.Array]]:
        """Return the function from the cotangent of the output to those of (block, x), for the call that stored
        `saved`.
        """
        remaining = iter(saved)
        leaves = [next(remaining) if stored else leaf for leaf, stored in zip(self._leaves, self._stored, strict=True)]
        return jax.tree.unflatten(self._tree, leaves)


class Parts:
    """A model taken apart into its blocks, by chunk, and the rest."""

    def __init__(self, model: Model, chunks: int) -> None:
        """Take a model apart; block leaves are [n, ...] with one chunk, else [v, n, ...]."""
        self.config = model.config
        leaves, self._tree = jax.tree.flatten(model)
        self._is_block = [name.startswith("blocks.") for name, _ in named_leaves(model)]
        self._shapes = [leaf.shape for leaf in leaves]
        self._block_tree = jax.tree.structure(model.blocks)
        self._original = [leaf for leaf, block in zip(leaves, self._is_block, strict=True) if block]
        self.block_leaves = [leaf.reshape(-1, *leaf.shape[1 + (chunks > 1) :]) for leaf in self._original]
        self.others = [leaf for leaf, block in zip(leaves, self._is_block, strict=True) if not block]
        self.layers = self.block_leaves[0].shape[0] // chunks

    def layer(self, chunk: Index, i: Index) -> Block:
        """Return the i-th layer of a chunk."""
        return jax.tree.unflatten(self._block_tree, [_take(a, chunk * self.layers + i, 0) for a in self.block_leaves])

    def model(self, others: Leaves) -> Model:
        """Return the model with other weights outside the blocks."""
        return self.join(self._original, others)

    def join(self, block_leaves: Leaves, others: Leaves) -> Model:
        """Build a model from these leaves, in the shapes that the model had at first."""
        blocks, rest = iter(block_leaves), iter(others)
        leaves = [
            next(blocks).reshape(shape) if block else next(rest)
            for block, shape in zip(self._is_block, self._shapes, strict=True)
        ]
        return jax.tree.unflatten(self._tree, leaves)


def _add(sums: Leaves, gradients: Leaves) -> Leaves:
    return [total + g.astype(jnp.float32) for total, g in zip(sums, gradients, strict=True)]


def _add_if(valid: jax.Array | bool, sums: Losses, losses: Losses) -> Losses:
    return {name: total + jnp.where(valid, losses[name], 0) for name, total in sums.items()}
