"""Grouped-query attention, two ways: plain XLA (any device, any pattern) and cuDNN's flash attention (GPU).

A kernel other than plain XLA declares what it can do (`CUDNN_CAN`) and is handed all arguments of an attention call, so
that it raises instead of leaving one out.

Shapes: B batch, S queries, T keys, N query heads, K key/value heads, H head dim; G = N / K queries per key.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from megajax.models.layers import capped

Places = np.ndarray | jax.Array
"""Positions in a sequence, [S], or [B, S] if every sequence has its own."""
Bias = Callable[[Places, Places], jax.Array]
"""Function from positions of queries and keys to fp32 terms [N, S, T] (or [B, N, S, T]) for their scores."""
Drop = Callable[[jax.Array], jax.Array]
"""Function that applies dropout to the attention probabilities."""


class Pattern(NamedTuple):
    """Rule that says which keys a query sees, and how their scores are scaled, shifted and capped."""

    causal: bool = True
    """Whether a query sees no key after it."""
    window: int | None = None
    """Number of keys that a query sees, itself and the window - 1 keys before it; None = no limit."""
    scale: float | None = None
    """Factor of the scores; None = 1 / sqrt(H)."""
    bias: Bias | None = None
    """Bias that is added to the scaled scores."""
    softcap: float | None = None
    """Cap c that turns scaled scores s into c tanh(s / c), before the bias; None = no cap."""

    def visible(
        self,
        q_places: Places,
        k_places: Places,
        q_segments: jax.Array | None = None,
        k_segments: jax.Array | None = None,
    ) -> jax.Array:
        """Return which keys every query sees.

        Args:
            q_places: positions of the queries, [S] or [B, S].
            k_places: positions of the keys, [T] or [B, T].
            q_segments: document numbers of the queries, [B, S], or None for one document.
            k_segments: document numbers of the keys, [B, T].

        Returns:
            The mask [B or 1, S, T], bool.
        """
        q, k = (jnp.atleast_2d(jnp.asarray(places)) for places in (q_places, k_places))
        q, k = q[:, :, None], k[:, None, :]
        mask = q >= k if self.causal else jnp.ones(jnp.broadcast_shapes(q.shape, k.shape), bool)
        if self.window is not None:
            mask = mask & (q - k < self.window)
        if q_segments is not None and k_segments is not None:
            mask = mask & (q_segments[:, :, None] == k_segments[:, None, :])
        return mask


Need = Literal["segments", "later keys", "window", "scale", "softcap", "bias", "dropout"]
NEEDS: dict[Need, str] = {
    "segments": "segment_ids keep documents, conversations or padding apart",
    "later keys": "queries see keys after them (not causal)",
    "window": "model.window hides keys that are far away",
    "scale": "the scores have a factor of their own (model.attention_scale)",
    "softcap": "the scores are capped (model.attention_softcap)",
    "bias": "a bias is added to the scores (alibi or relative positions)",
    "dropout": "attention_dropout needs the probabilities",
}
"""Properties of an attention call beyond plain causal attention, in words for messages."""
CUDNN_CAN: frozenset[Need] = frozenset()


def needs_of(pattern: Pattern, segment_ids: jax.Array | None, drop: Drop | None) -> frozenset[Need]:
    """Return what an attention call needs beyond plain causal attention."""
    asked: dict[Need, bool] = {
        "segments": segment_ids is not None,
        "later keys": not pattern.causal,
        "window": pattern.window is not None,
        "scale": pattern.scale is not None,
        "softcap": pattern.softcap is not None,
        "bias": pattern.bias is not None,
        "dropout": drop is not None,
    }
    return frozenset(need for need, wanted in asked.items() if wanted)


def lacking(needs: frozenset[Need], can: frozenset[Need]) -> str | None:
    """Return in words the first need that a kernel cannot meet, or None."""
    return next((text for need, text in NEEDS.items() if need in needs - can), None)


def require(kernel: str, needs: frozenset[Need], can: frozenset[Need]) -> None:
    """Refuse a call if the kernel would have to leave something out.

    Raises:
        ValueError: the kernel cannot do all of it; the message names the kernel and what it cannot do.
    """
    if text := lacking(needs, can):
        raise ValueError(f"{kernel} attention was handed what it cannot do: {text}")


def xla_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    mask: jax.Array,
    drop: Drop | None = None,
    bias: jax.Array | None = None,
    scale: float | None = None,
    softcap: float | None = None,
) -> jax.Array:
    """Compute softmax(Q K^T / sqrt(H)) V with scores and softmax in fp32 (1706.03762, eq. 1).

    Args:
        q: queries [B, S, N, H]; query head n uses key/value head n // G.
        k: keys [B, T, K, H].
        v: values [B, T, K, H].
        mask: mask [B or 1, S, T] bool, True where a query sees a key.
        drop: dropout of the probabilities [B, K, G, S, T] (fp32), or None.
        bias: terms [N, S, T] or [B, N, S, T] that are added to the scores (fp32).
        scale: factor of the scores; None = 1 / sqrt(H).
        softcap: cap c that turns scores s into c tanh(s / c) before the bias is added.

    Returns:
        The output [B, S, N, H] in q's dtype.
    """
    batch, queries, heads, head_dim = q.shape
    kv_heads = k.shape[2]
    q = q.reshape(batch, queries, kv_heads, heads // kv_heads, head_dim)
    scores = jnp.einsum("bskgh,btkh->bkgst", q, k, preferred_element_type=jnp.float32)
    scores = capped(scores * (head_dim**-0.5 if scale is None else scale), softcap)
    if bias is not None:
        scores += bias.reshape(*bias.shape[:-3], kv_heads, heads // kv_heads, *bias.shape[-2:])
    scores = jnp.where(mask[:, None, None], scores, jnp.finfo(jnp.float32).min)
    probabilities = jax.nn.softmax(scores, axis=-1)
    if drop is not None:
        probabilities = drop(probabilities)
    out = jnp.einsum("bkgst,btkh->bskgh", probabilities.astype(v.dtype), v)
    return out.reshape(batch, queries, heads, head_dim)


def cudnn_attention(
    q: jax.Array, k: jax.Array, v: jax.Array, segment_ids: jax.Array | None, pattern: Pattern, drop: Drop | None
) -> jax.Array:
    """Compute plain causal attention in bf16 or fp16 with cuDNN's fused kernel, without an S x T array.

    Raises:
        ValueError: more than plain causal attention is asked for.
    """
    require("cudnn", needs_of(pattern, segment_ids, drop), CUDNN_CAN)
    return jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation="cudnn")
