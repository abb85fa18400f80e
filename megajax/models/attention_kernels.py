"""Causal grouped-query attention, two ways: plain XLA (any device, any mask) and cuDNN's flash attention (GPU).

Shapes: B batch, S queries, T keys, N query heads, K key/value heads, H head dim; G = N / K queries per key.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp


def visible(q_positions: jax.Array, k_positions: jax.Array, segment_ids: jax.Array | None) -> jax.Array:
    """Which key a query may look at, [B or 1, S, T]: none after it, none of another document."""
    mask = (q_positions[:, None] >= k_positions[None, :])[None]
    if segment_ids is not None:
        mask = mask & (segment_ids[:, :, None] == segment_ids[:, None, :])
    return mask


def xla_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    *,
    segment_ids: jax.Array | None = None,
    mask: jax.Array | None = None,
    drop: Callable[[jax.Array], jax.Array] | None = None,
) -> jax.Array:
    """softmax(Q K^T / sqrt(H)) V with scores and softmax in fp32 (1706.03762, eq. 1).

    Args:
        q: [B, S, N, H]; query head n uses key/value head n // G.
        k: [B, T, K, H].
        v: [B, T, K, H].
        segment_ids: [B, S] document numbers; queries see keys of their own document only.
        mask: [B or 1, S, T] which keys are visible; default is causal.
        drop: dropout, applied to the probabilities [B, K, G, S, T] (fp32).

    Returns:
        [B, S, N, H] in q's dtype.
    """
    batch, queries, heads, head_dim = q.shape
    keys, kv_heads = k.shape[1:3]
    q = q.reshape(batch, queries, kv_heads, heads // kv_heads, head_dim)
    scores = jnp.einsum("bskgh,btkh->bkgst", q, k, preferred_element_type=jnp.float32) * head_dim**-0.5
    if mask is None:
        mask = visible(jnp.arange(queries), jnp.arange(keys), segment_ids)
    scores = jnp.where(mask[:, None, None], scores, jnp.finfo(jnp.float32).min)
    probabilities = jax.nn.softmax(scores, axis=-1)
    if drop is not None:
        probabilities = drop(probabilities)
    out = jnp.einsum("bkgst,btkh->bskgh", probabilities.astype(v.dtype), v)
    return out.reshape(batch, queries, heads, head_dim)


def cudnn_attention(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    """The same for plain causal attention in bf16 or fp16 through cuDNN's fused kernel; no S x T array exists."""
    return jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation="cudnn")
