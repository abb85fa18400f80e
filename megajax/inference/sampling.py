"""Choice of the next token from its logits.

Shapes: V vocabulary without padding.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from megajax.config.base import InputError


@dataclass(frozen=True)
class Sampling:
    """Choose how a token is drawn.

    temperature 0 is greedy; top_k 0 and top_p 1 switch their filter off.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0

    def __post_init__(self) -> None:
        """Refuse values out of their range."""
        if not self.temperature >= 0:
            raise InputError(f"temperature is {self.temperature}: expected 0 (greedy) or more")
        if self.top_k < 0:
            raise InputError(f"top_k is {self.top_k}: expected 0 (off) or more")
        if not 0 <= self.top_p <= 1:
            raise InputError(f"top_p is {self.top_p}: expected a probability between 0 and 1")


def choose_token(logits: jax.Array, key: jax.Array, sampling: Sampling) -> jax.Array:
    """Choose one token id (int32) from logits [V] fp32."""
    if sampling.temperature == 0:
        return jnp.argmax(logits).astype(jnp.int32)
    logits = (logits - logits.max()) / sampling.temperature  # at 0 the best one survives any temperature
    logits = keep_top_p(keep_top_k(logits, sampling.top_k), sampling.top_p)
    return jax.random.categorical(key, logits).astype(jnp.int32)


def keep_top_k(logits: jax.Array, k: int) -> jax.Array:
    """Set all logits [V] but the k largest (and ties with them) to -inf; k = 0, or k above V, keeps all."""
    if k == 0 or k >= logits.shape[0]:
        return logits
    return jnp.where(logits >= jax.lax.top_k(logits, k)[0][-1], logits, -jnp.inf)


def keep_top_p(logits: jax.Array, p: float) -> jax.Array:
    """Keep the smallest set of logits [V] with total probability >= p, at least one, and set the others to -inf
    (1904.09751).
    """
    if p == 1:
        return logits
    order = jnp.argsort(-logits)
    probabilities = jax.nn.softmax(logits)[order]
    before = jnp.cumsum(probabilities) - probabilities
    keep = (before < p).at[0].set(True)
    return jnp.where(jnp.zeros_like(keep).at[order].set(keep), logits, -jnp.inf)
