"""Context parallelism: a zig-zag order of tokens, and ring attention.

With c shards the sequence is cut into 2 c pieces and shard r holds pieces r and 2 c - 1 - r (Megatron-LM; 2407.21783
§3.3.2). An early piece attends to few keys and its late partner to many, so causal attention is the same work on every
shard. All arrays [B, S, ...] are in this order. Values that depend on the true position of a token are derived before
the tokens are reordered (positions, labels) or from `token_order` (causal mask, dropout).

In ring attention (2310.01889) keys and values travel round the `context` ring, and partial softmaxes are merged. Unlike
with gathering (`parallel.layout`), no device ever holds the keys of the whole sequence, and a block can travel while
the block before it is used. Over `context` a layer sends, per microbatch, c - 1 times this device's keys and values
forward, and the same together with their gradients backward.

Shapes: B batch, S sequence or queries and keys of one device, c context shards, N heads, K kv heads, G = N / K, H head
dim.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from megajax.models.attention_kernels import Drop, Need, Pattern, needs_of, require
from megajax.parallel.collectives import Collectives


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


RING_CAN: frozenset[Need] = frozenset({"segments"})


class Partial(NamedTuple):
    """The softmax over the keys seen so far, unnormalised (online softmax, 1805.02867), fp32."""

    maximum: jax.Array
    """Largest score of every query so far, [B, K, G, S]."""
    total: jax.Array
    """Sum of exp(score - maximum), [B, K, G, S]."""
    values: jax.Array
    """Sum of exp(score - maximum) x value, [B, K, G, S, H]."""


def ring_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    segment_ids: jax.Array | None,
    pattern: Pattern,
    drop: Drop | None,
    net: Collectives,
) -> jax.Array:
    """Compute causal attention of this device's queries to all keys, in a region that is manual over `context`.

    Args:
        q: queries [B, S, N, H], with tokens in zig-zag order.
        k: keys [B, S, K, H].
        v: values [B, S, K, H].
        segment_ids: document numbers [B, S], or None.
        pattern: rule for the keys that a query sees.
        drop: dropout of the attention probabilities, or None.
        net: collectives of the mesh.

    Raises:
        ValueError: more than causal attention within documents is asked for.
    """
    require("ring", needs_of(pattern, segment_ids, drop), RING_CAN)
    batch, length, heads, head_dim = q.shape
    kv_heads, shards = k.shape[2], net.sizes["context"]
    rank = net.index("context")
    places = jnp.asarray(token_order(length * shards, shards)).reshape(shards, length)
    grouped = q.reshape(batch, length, kv_heads, heads // kv_heads, head_dim)
    shape = (batch, kv_heads, heads // kv_heads, length)
    lowest = jnp.finfo(jnp.float32).min
    sums = Partial(jnp.full(shape, lowest), jnp.zeros(shape), jnp.zeros((*shape, head_dim)))
    block = (k, v, segment_ids)
    for turn in range(shards):
        k, v, k_segments = block
        mask = pattern.visible(places[rank], places[(rank - turn) % shards], segment_ids, k_segments)
        sums = _merge(sums, grouped, k, v, mask)
        if turn < shards - 1:
            block = jax.tree.map(lambda x: net.shift(x, "context", 1), block)
    out = sums.values / sums.total[..., None]
    return jnp.moveaxis(out, 3, 1).reshape(q.shape).astype(q.dtype)


def _merge(sums: Partial, q: jax.Array, k: jax.Array, v: jax.Array, mask: jax.Array) -> Partial:
    """Merge one more block of keys into the sums.

    A query's own token is in the first block, so its maximum is a real score.
    """
    scores = jnp.einsum("bskgh,btkh->bkgst", q, k, preferred_element_type=jnp.float32) * q.shape[-1] ** -0.5
    scores = jnp.where(mask[:, None, None], scores, -jnp.inf)
    maximum = jnp.maximum(sums.maximum, scores.max(axis=-1))
    keep, weights = jnp.exp(sums.maximum - maximum), jnp.exp(scores - maximum[..., None])
    new = jnp.einsum("bkgst,btkh->bkgsh", weights.astype(v.dtype), v, preferred_element_type=jnp.float32)
    return Partial(maximum, sums.total * keep + weights.sum(axis=-1), sums.values * keep[..., None] + new)
