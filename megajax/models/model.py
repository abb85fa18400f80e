"""Base class of the model families, through which training, pipelines, generation and the planner know a family.

Shapes: B batch, S sequence, T decoder sequence, D embed, V padded vocabulary.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import Any, ClassVar, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from megajax.config.data import DataConfig
from megajax.config.model import ModelConfig
from megajax.models.block import RESIDUAL, Block, Remat, Units, in_units, keep_all, run_units
from megajax.models.context import Context
from megajax.models.dropout import dropout, layer_keys
from megajax.models.layout import Layout
from megajax.models.losses import Losses, add
from megajax.models.parameters import exact_normal

Batch = dict[str, jax.Array]


class RowArray(NamedTuple):
    """Shape and dtype of one sample's part of an array in a batch."""

    shape: tuple[int, ...]
    dtype: Any


class Stack(NamedTuple):
    """The layers that one scan runs, as the planner counts them."""

    layers: int
    sequence: int
    """Number of tokens per sample in these layers."""
    memory: int = 0
    """Number of tokens of the encoder's output to which every layer attends as well; 0 = none."""
    causal: bool = True
    """Whether a token attends only to itself and tokens before it."""


class Model(nnx.Module):
    """Base class of the model families: embedding, blocks and head.

    A pipeline distributes `blocks` over its stages; everything else is on every stage.
    """

    causal: ClassVar[bool] = True
    """Whether tokens in the blocks that a pipeline runs attend only to the past."""
    head_transform: ClassVar[bool] = False
    """Whether hidden states are multiplied by a matrix [D, D] before the output matrix."""
    sees: ClassVar[str] = "causal"
    """Attention of the model, in a few words for the log."""
    writes: ClassVar[Literal["continuation", "answer"] | None] = None
    """Kind of text that the model generates from a prompt: its continuation, or a decoder's answer to it."""
    config: ModelConfig
    blocks: Block
    word_embedding: nnx.Param

    @abstractmethod
    def __init__(self, key: jax.Array, config: ModelConfig) -> None:
        """Draw all weights; they depend on (key, config) alone, never on the layout."""

    @classmethod
    def arrays(cls, config: ModelConfig, data: DataConfig) -> dict[str, RowArray]:
        """Return the arrays of a training batch by name, without its dimension B.

        All families have tokens and labels int32 [B, S], loss_mask fp32 [B, S] and sample_ids uint32 [B], from which
        dropout keys follow. They have segment_ids int32 [B, S] if tokens attend only to their own segment; padding is a
        segment of its own. Most have positions int32 [B, S] as well.
        """
        ids, mask = RowArray((data.seq_length,), np.int32), RowArray((data.seq_length,), np.float32)
        return {
            "tokens": ids,
            "labels": ids,
            "loss_mask": mask,
            "positions": ids,
            "sample_ids": RowArray((), np.uint32),
        }

    @classmethod
    def stacks(cls, config: ModelConfig, sequence: int, decoder_sequence: int = 0) -> tuple[Stack, ...]:
        """Return the stacks of layers in the order in which they run; a pipeline cuts the last one."""
        return (Stack(config.num_layers, sequence, causal=cls.causal),)

    @classmethod
    def decoder_tokens(cls, data: DataConfig) -> int:
        """Return the number T of tokens per sample that the decoder behind an encoder reads, or 0 for other models."""
        return 0

    @abstractmethod
    def context(self, batch: Batch, layout: Layout, keys: jax.Array | None) -> Context:
        """Return the context of the blocks for a batch of `arrays`."""

    @abstractmethod
    def embed(self, batch: Batch, context: Context) -> jax.Array:
        """Embed the tokens of a batch into the residual stream [B, S, D]."""

    @abstractmethod
    def head_losses(self, x: jax.Array, batch: Batch, context: Context) -> Losses:
        """Return the losses of the head for the residual stream [B, S, D] after the last block.

        The token losses are weighted by `batch["weights"]` [B, S] fp32.
        """

    def losses(self, batch: Batch, context: Context, remat: Remat = keep_all) -> Losses:
        """Return all terms of the loss for a batch with weights."""
        x, inside = self.run(self.embed(batch, context), context, remat)
        return add(self.head_losses(x, batch, context), inside)

    @property
    def trunk(self) -> tuple[Block, ...]:
        """Return the stacked blocks between `embed` and the head in their order; `blocks` are the last."""
        return (self.blocks,)

    @property
    def units(self) -> tuple[Units, ...]:
        """Return `trunk`, divided into the patterns in which it runs."""
        return tuple(in_units(blocks, len(self.config.kind_pattern)) for blocks in self.trunk)

    def run(self, x: jax.Array, context: Context, remat: Remat = keep_all) -> tuple[jax.Array, Losses]:
        """Run all blocks on x [B, S, D] and return it with the losses that arise inside (see `run_blocks`)."""
        inside: Losses = {}
        first = 0
        for units in self.units:
            x, losses = run_units(units, x, context, remat, first)
            inside |= losses
            first += units.layers(len(context.kinds))
        return x, inside

    def drop_embedding(self, x: jax.Array, context: Context) -> jax.Array:
        """Apply dropout to the embedding with the keys of layer 0."""
        keys = None if context.keys is None else layer_keys(context.keys, 0)
        return dropout(x, self.config.hidden_dropout, keys, "embedding", context.layout, RESIDUAL)

    @property
    def vocab_size(self) -> int:
        """Return the number of ids without padding."""
        assert self.config.vocab_size is not None
        return self.config.vocab_size


def vocabulary_table(key: jax.Array, config: ModelConfig) -> nnx.Param:
    """Draw an embedding [V, D] whose padding rows are zero, so that padding does not change any other number."""
    assert config.vocab_size is not None
    rows = exact_normal(key, (config.vocab_size, config.hidden_size), config.init_std)
    padding = config.padded_vocab_size - config.vocab_size
    return nnx.Param(jnp.pad(rows, ((0, padding), (0, 0))), axes=("vocab", "embed"), role="embedding")
