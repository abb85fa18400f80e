"""Mixture of experts on a mesh: `expert` shards experts and samples alike, `tensor` cuts every expert.

An expert receives the tokens of all devices along (expert, tensor) and computes those that are assigned to it
(Megatron-LM's all-gather dispatcher). So no token is dropped, and the number of bytes sent does not depend on the
router. A microbatch sends, in elements of one device's slice of the residual stream, with e x t devices:

    over expert, tensor     forward   all-gather of [e B, t S, D], reduce-scatter of the same
                            backward  2 all-gather (cotangent; the input again), reduce-scatter

It also gathers the experts and shares [e B, t S, k] of the tokens, and sums a few numbers for the losses. Without
sequence parallelism one all-reduce over `tensor` replaces the all-gather and the reduce-scatter. Over `fsdp` the
matrices of this device's experts are gathered and their gradients reduce-scattered. The experts' gradients are summed
over `context`, the router's over all automatic axes.

All of this runs in a fully manual region, as embedding and cross-entropy do (see `parallel.vocabulary`), because the
partitioner cannot split the gathers. Each device computes its terms of the sums and differentiates them inside the
region.

Shapes: B samples, S positions and D embed of this device's slice of the residual stream, k experts per token.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from megajax.config.model import ModelConfig
from megajax.models.block import RESIDUAL
from megajax.models.experts import AXES, Weights, apply_experts, route, router_losses
from megajax.models.losses import Losses
from megajax.parallel.collectives import Collectives
from megajax.parallel.mesh import AUTO_AXES
from megajax.parallel.rules import Rules


class Experts:
    """Mixture of experts on one mesh, inside the region that is manual over `MANUAL_AXES`."""

    def __init__(self, rules: Rules) -> None:
        """Derive the specs with which each array enters the manual region."""
        self.rules = rules
        self.net = Collectives(rules.mesh)
        self.sequence = rules.rule("residual_sequence").in_compute
        self.copies = () if rules.sequence_parallel else ("tensor",)
        residual, tokens = rules.in_compute(RESIDUAL), rules.in_compute(RESIDUAL[:2])
        self.inputs = residual, Weights(*(rules.in_compute(axes) for axes in AXES)), tokens

    def __call__(
        self, x: jax.Array, weights: Weights, token_weights: jax.Array | None, config: ModelConfig
    ) -> tuple[jax.Array, Losses]:
        """Compute `models.experts.mixture` over the mesh, and its losses as sums over this replica's tokens."""
        terms = partial(self._terms, config=config)
        losses = PartitionSpec()

        def forward(x: Any, weights: Weights, token_weights: Any) -> tuple[jax.Array, Losses]:
            y, losses = terms(x, weights, token_weights)
            return self.net.psum(y, *self.copies), {k: self.net.psum(loss, *AUTO_AXES) for k, loss in losses.items()}

        def backward(x: Any, weights: Weights, token_weights: Any, cotangents: Any) -> tuple[jax.Array, Weights]:
            # The router's gradient stays in fp32 until the terms of all devices are summed up.
            precise = weights._replace(router=weights.router.astype(jnp.float32))
            _, pull = jax.vjp(lambda x, weights: terms(x, weights, token_weights), x, precise)
            dx, (router, fc1, fc2) = pull(cotangents)
            router = self.net.psum(router, *AUTO_AXES).astype(weights.router.dtype)
            fc1, fc2 = (self.net.psum(d, "context") for d in (fc1, fc2))
            return self.net.psum(dx, *self.copies), Weights(router, fc1, fc2)

        out = self.inputs[0], losses
        forward_manual = self._manual(forward, self.inputs, out)
        backward_manual = self._manual(backward, (*self.inputs, out), self.inputs[:2])

        @jax.custom_vjp
        def mixture(*args: Any) -> tuple[jax.Array, Losses]:
            return forward_manual(*args)

        mixture.defvjp(
            lambda *args: (forward_manual(*args), args),
            lambda args, cotangents: (*backward_manual(*args, cotangents), None),
        )
        return mixture(x, weights, token_weights)

    def _terms(
        self, x: jax.Array, weights: Weights, token_weights: jax.Array | None, config: ModelConfig
    ) -> tuple[jax.Array, Losses]:
        """Compute this device's terms of the outputs, to be summed over `copies`, and of the losses, to be summed over
        all.
        """
        routing = route(x, weights.router, config)
        y = apply_experts(
            self._enter(x),
            self._enter(routing.experts),
            self._enter(routing.shares),
            self.net.all_gather(weights.fc1, "fsdp", dim=1),
            self.net.all_gather(weights.fc2, "fsdp", dim=2),
            self.net.index("expert") * len(weights.fc1),
            config,
        )
        if token_weights is None:
            return self._leave(y), {}
        losses = router_losses(routing, token_weights, lambda a: self.net.psum(a, *self.sequence))
        return self._leave(y), {name: loss / self.rules.size(*self.copies) for name, loss in losses.items()}

    def _enter(self, x: jax.Array) -> jax.Array:
        """Gather x from all devices that share the experts."""
        if self.rules.sequence_parallel:
            x = self.net.all_gather(x, "tensor", dim=1)
        return self.net.all_gather(x, "expert", dim=0)

    def _leave(self, x: jax.Array) -> jax.Array:
        """Sum x over all devices that share the experts, and leave each of them its own slice."""
        x = self.net.reduce_scatter(x, "expert", dim=0)
        return self.net.reduce_scatter(x, "tensor", dim=1) if self.rules.sequence_parallel else x

    def _manual(self, fn: Callable[..., Any], in_specs: Any, out_specs: Any) -> Callable[..., Any]:
        return jax.shard_map(fn, in_specs=in_specs, out_specs=out_specs, axis_names=set(AUTO_AXES), check_vma=False)
