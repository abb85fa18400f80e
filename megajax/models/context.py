"""The context of a forward pass: all that it knows besides the hidden states."""

from __future__ import annotations

from typing import NamedTuple

import jax

from megajax.models.attention_kernels import Bias
from megajax.models.layout import Layout
from megajax.models.rope import Angles


class Kind(NamedTuple):
    """Window and rotary angles of the layers of one kind."""

    window: int | None = None
    """Window of the attention, see `Pattern`."""
    angles: Angles | None = None
    """Rotary angles of every position."""


class Context(NamedTuple):
    """State of a forward pass besides the hidden states.

    It is passed down unchanged, except that every layer gets its own dropout keys, and no kind but its own.
    """

    layout: Layout
    """Layout in which the computation runs."""
    segment_ids: jax.Array | None = None
    """Document numbers [B, S] when documents must not see each other."""
    keys: jax.Array | None = None
    """Dropout keys [B], one for each sample; None switches dropout off."""
    weights: jax.Array | None = None
    """Weights [B, S] of the token losses in training, fp32; losses that arise inside blocks use them."""
    bias: Bias | None = None
    """Attention bias of all blocks."""
    memory: tuple[jax.Array, jax.Array | None] | None = None
    """Encoder output [B, S, D] and its segments [B, S], which the blocks of a decoder attend to."""
    kinds: tuple[Kind, ...] = (Kind(),)
    """Kinds of layers, a pattern that repeats from the first layer on."""

    @property
    def of_kinds(self) -> tuple[Context, ...]:
        """Return the context of every kind of layer."""
        return tuple(self._replace(kinds=(kind,)) for kind in self.kinds)

    @property
    def kind(self) -> Kind:
        """Return the kind of the layer that this is the context of."""
        (kind,) = self.kinds
        return kind
