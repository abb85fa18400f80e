"""The few places where a parallel layout may step into the maths, and what they do on one device: nothing.

Models call these methods and never ask what a mesh is; `megajax.parallel.layout.MeshLayout` overrides them.

Shapes: B batch, S sequence, D embed, V vocabulary rows, P positions.
"""

from __future__ import annotations

from typing import TypeVar

import jax
import numpy as np

from megajax.config.model import ModelConfig
from megajax.models.attention_kernels import Drop, Pattern, Places, xla_attention
from megajax.models.cross_entropy import linear_cross_entropy
from megajax.models.experts import Weights, mixture
from megajax.models.losses import Losses

M = TypeVar("M")
Table = tuple[jax.Array, jax.Array, str]
"""Weights [V, D], ids [B, S] of the rows to look up, logical axis of the rows."""


class Layout:
    """One device. Every method is the plain definition of what a mesh has to reproduce."""

    def weights(self, module: M) -> M:
        """Give a module's weights as the computation needs them (a mesh gathers what is sharded at rest)."""
        return module

    def enter_tensor(self, x: jax.Array) -> jax.Array:
        """[B, S, D] residual stream -> input of a column-parallel layer (1909.08053 §3: f; 2205.05198 §4.2.2: g)."""
        return x

    def leave_tensor(self, x: jax.Array) -> jax.Array:
        """[B, S, D] output of a row-parallel layer -> residual stream (the conjugate of `enter_tensor`)."""
        return x

    def shard(self, x: jax.Array, *axes: str | None) -> jax.Array:
        """Name the logical axis of every dimension of an activation (None: not sharded)."""
        return x

    def token_order(self, length: int) -> np.ndarray:
        """[S] true place of the token at each place of a sequence (context parallelism holds them in another order)."""
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
        """Self-attention; see `xla_attention` for shapes. Keys (the last dim that `drop` sees) are in true order."""
        places = self.token_order(q.shape[1])
        return attend(q, k, v, pattern, (places, places), (segment_ids, segment_ids), drop)

    def experts(
        self, x: jax.Array, weights: Weights, token_weights: jax.Array | None, config: ModelConfig
    ) -> tuple[jax.Array, Losses]:
        """Mixture of experts [B, S, D] -> [B, S, D], and the losses of its router; see `mixture`."""
        return mixture(x, weights, token_weights, config)

    def lookup(self, *tables: Table) -> jax.Array:
        """Sum over the tables of the rows that their ids name -> [B, S, D]."""
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
        """Weighted sum of token losses, scalar fp32; see `linear_cross_entropy`."""
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
    """Attention of queries and keys that stand at the given places, in the given documents (None: in one)."""
    bias = None if pattern.bias is None else pattern.bias(*places)
    return xla_attention(q, k, v, pattern.visible(*places, *segments), drop, bias, pattern.scale, pattern.softcap)
