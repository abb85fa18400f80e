"""Zig-zag order of tokens under context parallelism, which makes causal attention the same work on every shard.

With c shards the sequence is cut into 2 c pieces and shard r holds pieces r and 2 c - 1 - r (Megatron-LM; 2407.21783
§3.3.2). An early piece attends to few keys and its late partner to many, which adds up to the same work. All arrays [B,
S, ...] are in this order. Values that depend on the true position of a token are derived before the tokens are
reordered (positions, labels) or from `token_order` (causal mask, dropout).

Shapes: S sequence, c context shards.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np


def pieces(shards: int) -> list[int]:
    """Return the index of the piece of the sequence at each of the 2 c places."""
    return [piece for shard in range(shards) for piece in (shard, 2 * shards - 1 - shard)]


def token_order(length: int, shards: int) -> np.ndarray:
    """Return the true position of the token at each place, [S]."""
    if shards == 1:
        return np.arange(length, dtype=np.int32)
    size = length // (2 * shards)
    return (np.array(pieces(shards))[:, None] * size + np.arange(size)).astype(np.int32).reshape(-1)


def in_true_order(x: jax.Array, shards: int) -> jax.Array:
    """Bring whole sequences [B, S, ...] from zig-zag to true order, by slices, which every partitioner handles."""
    if shards == 1:
        return x
    size, order = x.shape[1] // (2 * shards), pieces(shards)
    return jnp.concatenate([x[:, at * size : (at + 1) * size] for at in np.argsort(order)], axis=1)
