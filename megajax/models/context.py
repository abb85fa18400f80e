"""What a forward pass knows besides the hidden states."""

from __future__ import annotations

from typing import NamedTuple

import jax

from megajax.models.attention_kernels import Bias
from megajax.models.layout import Layout
from megajax.models.rope import Angles


class Kind(NamedTuple):
    """All that layers of one kind have of their own."""

    window: int | None = None
    """See `Pattern`."""
    angles: Angles | None = None
    """Rotary angles of every position."""


class Context(NamedTuple):
    """Passed down unchanged, but for what a layer has of its own: dropout keys, and window and angles by its kind."""

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
    window: int | None = None
    """See `Pattern`."""
    kinds: tuple[Kind, ...] = ()
    """Kinds of layers, from the first on and again and again; none: all layers have `window` and `angles`."""

    @property
    def of_kinds(self) -> tuple[Context, ...]:
        """The context of every kind of layer."""
        return tuple(self._replace(window=kind.window, angles=kind.angles) for kind in self.kinds) or (self,)
