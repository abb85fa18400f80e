"""Context of a forward pass: everything that blocks need besides the hidden states."""

from __future__ import annotations

from typing import NamedTuple

import jax

from megajax.models.attention_kernels import Bias
from megajax.models.layout import Layout
from megajax.models.positions import Angles


class Kind(NamedTuple):
    """The attention window and the rotary angles for the layers of one kind."""

    window: int | None = None
    """Window of the attention (see `Pattern`)."""
    angles: Angles | None = None
    """Rotary angles of every position."""


class Context(NamedTuple):
    """The state of a forward pass besides the hidden states.

    It is passed down unchanged, except that every layer gets its own dropout keys, and only its own kind.
    """

    layout: Layout
    """Layout in which the computation runs."""
    segment_ids: jax.Array | None = None
    """Document numbers [B, S], or None if tokens may attend to all documents."""
    keys: jax.Array | None = None
    """Dropout keys [B], one for each sample; None = no dropout."""
    weights: jax.Array | None = None
    """Weights [B, S] of the token losses in training, fp32; losses that arise inside blocks use them."""
    bias: Bias | None = None
    """Attention bias of all blocks, or None."""
    memory: tuple[jax.Array, jax.Array | None] | None = None
    """Encoder output [B, S, D] and its segments [B, S], to which the blocks of a decoder attend."""
    kinds: tuple[Kind, ...] = (Kind(),)
    """Kinds of layers, as a pattern that repeats from the first layer on."""

    @property
    def of_kinds(self) -> tuple[Context, ...]:
        """Return the context of every kind of layer."""
        return tuple(self._replace(kinds=(kind,)) for kind in self.kinds)

    @property
    def kind(self) -> Kind:
        """Return the kind of the layer to which this context belongs."""
        (kind,) = self.kinds
        return kind
