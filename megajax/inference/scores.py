"""Log-probabilities of given tokens, with the logits of only one chunk of positions in memory at a time.

Shapes: B rows, S sequence, D embed, V vocabulary without padding, C positions of a chunk.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from megajax.models.gpt import Gpt
from megajax.models.layout import Layout
from megajax.models.losses import chunk_size
from megajax.models.t5 import T5


class TokenScores(NamedTuple):
    """The scores that a model gives to the tokens that really come next."""

    log_probabilities: jax.Array
    """Log-probabilities [B, S], fp32, in nats."""
    greedy: jax.Array
    """Flags [B, S], True where no other token is likelier."""


def score_tokens(model: Gpt | T5, hidden: jax.Array, labels: jax.Array, layout: Layout) -> TokenScores:
    """Score labels [B, S] as the tokens that follow hidden states [B, S, D]."""
    rows, length = labels.shape
    chunk = chunk_size(length, rows * model.vocab_size)
    count = -(-length // chunk)

    def chunked(a: jax.Array) -> jax.Array:
        a = jnp.pad(a, [(0, 0), (0, count * chunk - length)] + [(0, 0)] * (a.ndim - 2))
        return jnp.moveaxis(a.reshape(rows, count, chunk, *a.shape[2:]), 1, 0)

    def score(inputs: tuple[jax.Array, jax.Array]) -> TokenScores:
        hidden, labels = inputs
        logits = layout.shard(model.logits(hidden), "batch", None, None)
        return TokenScores(token_log_probabilities(logits, labels), jnp.argmax(logits, axis=-1) == labels)

    scores = jax.lax.map(score, (chunked(hidden), chunked(labels)))
    return jax.tree.map(lambda a: jnp.moveaxis(a, 0, 1).reshape(rows, -1)[:, :length], scores)


def token_log_probabilities(logits: jax.Array, tokens: jax.Array) -> jax.Array:
    """Return the log-probability [...] fp32 that a softmax over logits [..., V] gives to tokens [...]."""
    return jnp.take_along_axis(jax.nn.log_softmax(logits), tokens[..., None], axis=-1)[..., 0]


def score_batch(model: Gpt, tokens: jax.Array, labels: jax.Array, layout: Layout) -> TokenScores:
    """Score labels [B, S], each given the tokens [B, S] of its row up to its own position."""
    tokens = layout.shard(tokens, "batch", None)
    batch = {"tokens": tokens, "positions": jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)}
    hidden = model.hidden(batch, model.context(batch, layout, keys=None))
    return score_tokens(model, hidden, labels, layout)
