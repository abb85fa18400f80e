"""Causal grouped-query attention, two ways: plain XLA (any device, any mask) and cuDNN's flash attention (GPU).

Shapes: B batch, S queries, T keys, N query heads, K key/value heads, H head dim; G = N / K queries per key.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np


def visible(
    q_places: np.ndarray | jax.Array,
    k_places: np.ndarray | jax.Array,
    q_segments: jax.Array | None,
    k_segments: jax.Array | None,
) -> jax.Array:
    """Which key a query may look at: none after it, none of another document.

    Args:
        q_places: [S] place of each query in its sequence.
        k_places: [T] place of each key.
        q_segments: [B, S] document numbers, or None for one document.
        k_segments: [B, T].

    Returns:
        [B or 1, S, T] bool.
    """
    mask = (jnp.asarray(q_places)[:, None] >= jnp.asarray(k_places)[None, :])[None]
    if q_segments is not None and k_segments is not None:
        mask = mask & (q_segments[:, :, None] == k_segments[:, None, :])
    return mask


def xla_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    mask: jax.Array,
    drop: Callable[[jax.Array], jax.Array] | None = None,
) -> jax.Array:
    """softmax(Q K^T / sqrt(H)) V with scores and softmax in fp32 (1706.03762, eq. 1).

    Args:
        q: [B, S, N, H]; query head n uses key/value head n // G.
        k: [B, T, K, H].
        v: [B, T, K, H].
        mask: [B or 1, S, T] which keys are visible.
        drop: dropout, applied to the probabilities [B, K, G, S, T] (fp32).

    Returns:
        [B, S, N, H] in q's dtype.
    """
    batch, queries, heads, head_dim = q.shape
    kv_heads = k.shape[2]
    q = q.reshape(batch, queries, kv_heads, heads // kv_heads, head_dim)
    scores = jnp.einsum("bskgh,btkh->bkgst", q, k, preferred_element_type=jnp.float32) * head_dim**-0.5
    scores = jnp.where(mask[:, None, None], scores, jnp.finfo(jnp.float32).min)
    probabilities = jax.nn.softmax(scores, axis=-1)
    if drop is not None:
        probabilities = drop(probabilities)
    out = jnp.einsum("bkgst,btkh->bskgh", probabilities.astype(v.dtype), v)
    return out.reshape(batch, queries, heads, head_dim)


def cudnn_attention(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    """The same for plain causal attention in bf16 or fp16 through cuDNN's fused kernel; no S x T array exists."""
    return jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation="cudnn")
