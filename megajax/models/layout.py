"""Interface between models and parallel layouts: the few places where a layout may change the computation.

On one device these methods add nothing.

Models call these methods and know nothing of a mesh; `megajax.parallel.layout.MeshLayout` overrides them.

Shapes: B batch, S sequence, D embed, V vocabulary rows, P positions.
"""

from __future__ import annotations

from typing import TypeVar

import jax
import numpy as np

from megajax.config.model import ModelConfig
from megajax.models.attention_kernels import Drop, Pattern, Places, xla_attention
from megajax.models.experts import Weights, mixture
from megajax.models.losses import Losses, linear_cross_entropy

M = TypeVar("M")
Table = tuple[jax.Array, jax.Array, str]
"""Weights [V, D], ids [B, S] of the rows to look up, and logical axis of the rows."""


class Layout:
    """Layout of one device, in which every method is the plain definition that a mesh has to reproduce."""

    def weights(self, module: M) -> M:
        """Return a module with its weights as the computation needs them; a mesh gathers those that are sharded at
        rest.
        """
        return module

    def enter_tensor(self, x: jax.Array) -> jax.Array:
        """Turn the residual stream [B, S, D] into the input of a column-parallel layer.

        This is f of 1909.08053 §3, and g of 2205.05198 §4.2.2.
        """
        return x

    def leave_tensor(self, x: jax.Array) -> jax.Array:
        """Turn the output [B, S, D] of a row-parallel layer into the residual stream, as the conjugate of
        `enter_tensor`.
        """
        return x

    def shard(self, x: jax.Array, *axes: str | None) -> jax.Array:
        """Shard an activation by the logical axes of its dimensions (None: not sharded)."""
        return x

    def token_order(self, length: int) -> np.ndarray:
        """Return the true position of the token at each place of a sequence, [S].

        Context parallelism holds tokens in another order.
        """
        return np.arange(length, dtype=np.int32)

    def attention(
        self,
        q: jax.Array,
        k: jax.Array,
        v: jax.Array,
        pattern: Pattern,
        segment_ids: jax.Array | None,
        drop: Drop | None,
    ) -> jax.Array:
        """Compute self-attention, with shapes as in `xla_attention`.

        Keys, the last dimension of the probabilities given to `drop`, are in true order.
        """
        places = self.token_order(q.shape[1])
        return attend(q, k, v, pattern, (places, places), (segment_ids, segment_ids), drop)

    def experts(
        self, x: jax.Array, weights: Weights, token_weights: jax.Array | None, config: ModelConfig
    ) -> tuple[jax.Array, Losses]:
        """Compute a mixture of experts [B, S, D] -> [B, S, D] and the losses of its router (see `mixture`)."""
        return mixture(x, weights, token_weights, config)

    def lookup(self, *tables: Table) -> jax.Array:
        """Look up the rows of each table's ids and sum them over the tables, [B, S, D]."""
        return sum((weights[ids] for weights, ids, _ in tables[1:]), start=tables[0][0][tables[0][1]])

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
        """Return the weighted sum of token losses, scalar fp32 (see `linear_cross_entropy`)."""
        return linear_cross_entropy(x, head, labels, weights, vocab_size, bias, softcap)


def attend(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    pattern: Pattern,
    places: tuple[Places, Places],
    segments: tuple[jax.Array | None, jax.Array | None],
    drop: Drop | None = None,
) -> jax.Array:
    """Compute attention between queries and keys at the given positions, in the given documents (None: all in one)."""
    bias = None if pattern.bias is None else pattern.bias(*places)
    return xla_attention(q, k, v, pattern.visible(*places, *segments), drop, bias, pattern.scale, pattern.softcap)
