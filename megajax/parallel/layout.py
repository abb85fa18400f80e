"""Layout of models on a mesh (see `models.layout.Layout`): borders of the tensor-parallel region, weights, attention.

The compiler partitions the blocks over fsdp, context and tensor. The shardings that it must not guess are set here.
With plain sharding constraints the backward pass of a layer would gather the same cotangent once per matmul. So a
border is Megatron's conjugate pair, which constrains the activation one way and the cotangent the other way. Over
`tensor` a layer sends exactly this (per microbatch, [B, S, D] elements each; 2205.05198 §4.2.2):

    forward    2 all-gather (enter) + 2 reduce-scatter (leave)
    backward   2 all-gather (leave) + 2 reduce-scatter (enter) + 2 all-gather (inputs again, for the weight gradients)

Without sequence parallelism each pair is one all-reduce. Over `fsdp` every weight of the layer is gathered once per
forward and once per recomputation, and its gradient reduce-scattered.

Shapes: B batch, S sequence, D embed, N heads, K kv heads, H head dim.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TypeVar

import jax
import numpy as np
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec

from megajax.config.model import ModelConfig
from megajax.models.attention_kernels import Drop, Pattern, cudnn_attention
from megajax.models.block import RESIDUAL
from megajax.models.experts import Weights
from megajax.models.layers import WEIGHTS
from megajax.models.layout import Layout, Table, attend
from megajax.models.losses import Losses
from megajax.models.parameters import logical_axes
from megajax.parallel.collectives import Collectives
from megajax.parallel.context import in_true_order, ring_attention, token_order
from megajax.parallel.experts import Experts
from megajax.parallel.mesh import AUTO_AXES
from megajax.parallel.rules import Rules
from megajax.parallel.vocabulary import Vocabulary

M = TypeVar("M")
INSIDE = ("batch", "sequence", None)


class MeshLayout(Layout):
    """Lay models out over data, fsdp, context and tensor, inside a region that is manual over `MANUAL_AXES`."""

    def __init__(self, rules: Rules, attention: str = "xla") -> None:
        """Make the layout from the rules of a mesh and an attention kernel ("xla", "cudnn" or "ring")."""
        self.rules = rules
        self.attention_kernel = attention
        self.context = rules.size("context")
        self.vocabulary = Vocabulary(rules)

    def weights(self, module: M) -> M:
        """Gather the weights of a module over `fsdp`; their gradients are reduce-scattered."""

        def gather(param: nnx.Variable) -> nnx.Variable:
            axes = logical_axes(param)
            at_rest = self.rules.at_rest(axes, AUTO_AXES)
            gathered = conjugate(param[...], self.rules.in_compute(axes), at_rest)
            return param.replace(checkpoint_name(gathered, WEIGHTS))

        return jax.tree.map(gather, module, is_leaf=lambda node: isinstance(node, nnx.Variable))

    def enter_tensor(self, x: jax.Array) -> jax.Array:
        """All-gather the sequence over `tensor`; the cotangent is reduce-scattered."""
        return conjugate(x, self.rules.in_compute(INSIDE), self.rules.in_compute(RESIDUAL))

    def leave_tensor(self, x: jax.Array) -> jax.Array:
        """Reduce-scatter partial sums over `tensor` onto the sequence; the cotangent is all-gathered."""
        return conjugate(x, self.rules.in_compute(RESIDUAL), self.rules.in_compute(INSIDE))

    def shard(self, x: jax.Array, *axes: str | None) -> jax.Array:
        """Constrain an activation and its cotangent to the rules of its logical axes."""
        return jax.lax.with_sharding_constraint(x, self.rules.in_compute(axes))

    def attention(
        self,
        q: jax.Array,
        k: jax.Array,
        v: jax.Array,
        pattern: Pattern,
        segment_ids: jax.Array | None,
        drop: Drop | None,
    ) -> jax.Array:
        """Compute attention with the kernel of this layout.

        Heads are local to their `tensor` shard. Over `context` keys and values are gathered, or sent round the ring.

        Every kernel is handed all arguments of the call, and raises if it cannot honour one. `parallel.kernels` has
        chosen a kernel that can.

        Raises:
            ValueError: the kernel cannot compute this attention.
        """
        if self.attention_kernel == "ring":
            kernel = partial(ring_attention, pattern=pattern, drop=drop, net=Collectives(self.rules.mesh))
            return self._manual(kernel, q, k, v, segment_ids)
        if self.attention_kernel == "cudnn":
            if self.context > 1:
                raise ValueError("cudnn attention was handed what it cannot do: parts of the sequence (context)")
            return self._manual(partial(cudnn_attention, pattern=pattern, drop=drop), q, k, v, segment_ids)
        if self.context == 1:
            return super().attention(q, k, v, pattern, segment_ids, drop)
        k, v = self._all_keys(k), self._all_keys(v)
        k_segments = None if segment_ids is None else self._all_keys(segment_ids)
        places = self.token_order(q.shape[1])
        return attend(q, k, v, pattern, (places, np.sort(places)), (segment_ids, k_segments), drop)

    def _manual(self, kernel: Callable[..., jax.Array], *arrays: jax.Array | None) -> jax.Array:
        """Run a kernel on this device's samples, tokens and heads, because the partitioner cannot look into it."""
        axes = ("batch", "sequence", "heads", None)
        specs = tuple(None if a is None else self.rules.in_compute(axes[: a.ndim]) for a in arrays)
        out = self.rules.in_compute(axes)
        run = jax.shard_map(kernel, in_specs=specs, out_specs=out, axis_names=set(AUTO_AXES), check_vma=False)
        return run(*arrays)

    def token_order(self, length: int) -> np.ndarray:
        """Return the true position of each token, [S], in the zig-zag order over `context`."""
        return token_order(length, self.context)

    def _all_keys(self, x: jax.Array) -> jax.Array:
        """Gather x [B, S, ...] over `context` into true order; the cotangent is reduce-scattered back."""
        axes = ("batch", "sequence", "kv_heads", None)[: x.ndim]
        mine, whole = self.rules.in_compute(axes), self.rules.in_compute(("batch", None, *axes[2:]))
        return in_true_order(conjugate(x, whole, mine), self.context)

    def experts(
        self, x: jax.Array, weights: Weights, token_weights: jax.Array | None, config: ModelConfig
    ) -> tuple[jax.Array, Losses]:
        """Compute a mixture of experts over the mesh (see `Experts`)."""
        return Experts(self.rules)(x, weights, token_weights, config)

    def lookup(self, *tables: Table) -> jax.Array:
        """Look up rows in sharded tables (see `Vocabulary.lookup`)."""
        return self.vocabulary.lookup(list(tables))

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
        """Return the weighted sum of token losses (see `Vocabulary.cross_entropy`)."""
        return self.vocabulary.cross_entropy(x, head, labels, weights, vocab_size, bias, softcap)


def conjugate(x: jax.Array, forward: PartitionSpec, backward: PartitionSpec) -> jax.Array:
    """Return x sharded as `forward`, with a cotangent that is sharded as `backward`."""

    @jax.custom_vjp
    def border(x: jax.Array) -> jax.Array:
        return jax.lax.with_sharding_constraint(x, forward)

    border.defvjp(
        lambda x: (jax.lax.with_sharding_constraint(x, forward), None),
        lambda _, cotangent: (jax.lax.with_sharding_constraint(cotangent, backward),),
    )
    return border(x)
