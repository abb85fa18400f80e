"""What a forward pass knows besides the hidden states."""

from __future__ import annotations

from typing import NamedTuple

import jax

from megajax.models.attention_kernels import Bias
from megajax.models.layout import Layout
from megajax.models.rope import Angles


class Context(NamedTuple):
    """Passed down unchanged, but for the dropout keys, which each layer derives for itself."""

    layout: Layout
    """Where the maths touches the mesh."""
    segment_ids: jax.Array | None = None
    """[B, S] document numbers when documents must not see each other."""
    angles: Angles | None = None
    """Rotary angles of every position."""
    keys: jax.Array | None = None
    """[B] dropout keys, one a sample; None switches dropout off."""
    weights: jax.Array | None = None
    """[B, S] fp32 weights of the token losses, in training: losses that arise inside blocks go by them."""
    bias: Bias | None = None
    """Attention bias of all blocks."""
    memory: tuple[jax.Array, jax.Array | None] | None = None
    """Encoder output [B, S, D] and its segments [B, S], which the blocks of a decoder look at."""
