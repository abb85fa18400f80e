"""What training, pipelines and evaluation ask of every model family.

Shapes: B batch, S sequence, D embed, V padded vocabulary.
"""

from __future__ import annotations

from abc import abstractmethod

import jax
import jax.numpy as jnp
from flax import nnx

from megajax.config.model import ModelConfig
from megajax.models.block import RESIDUAL, Block, Remat, run_blocks
from megajax.models.context import Context
from megajax.models.dropout import dropout, layer_keys
from megajax.models.init import exact_normal
from megajax.models.layout import Layout
from megajax.models.losses import Losses, add

Batch = dict[str, jax.Array]


class Model(nnx.Module):
    """Embedding, blocks, head. `blocks` is what a pipeline runs; the rest every stage has."""

    config: ModelConfig
    blocks: Block
    word_embedding: nnx.Param

    @abstractmethod
    def __init__(self, key: jax.Array, config: ModelConfig) -> None:
        """Draw all weights; they depend on (key, config) alone, never on the layout."""

    @abstractmethod
    def context(self, batch: Batch, layout: Layout, keys: jax.Array | None) -> Context:
        """What the blocks need to know of a batch: see `megajax.data.batch` for its arrays."""

    @abstractmethod
    def embed(self, batch: Batch, context: Context) -> jax.Array:
        """Tokens -> residual stream [B, S, D]."""

    @abstractmethod
    def head_losses(self, x: jax.Array, batch: Batch, context: Context) -> Losses:
        """Residual stream [B, S, D] after the last block -> the losses of the head.

        `batch["weights"]` [B, S] fp32 are those of the token losses.
        """

    def losses(self, batch: Batch, context: Context, remat: Remat = lambda f: f) -> Losses:
        """All terms for a batch that has weights."""
        x, inside = run_blocks(self.blocks, self.embed(batch, context), context, remat)
        return add(self.head_losses(x, batch, context), inside)

    def drop_embedding(self, x: jax.Array, context: Context) -> jax.Array:
        """Dropout on the embedding, as of layer 0."""
        keys = None if context.keys is None else layer_keys(context.keys, 0)
        return dropout(x, self.config.hidden_dropout, keys, "embedding", context.layout, RESIDUAL)

    @property
    def vocab_size(self) -> int:
        """Ids that count."""
        assert self.config.vocab_size is not None
        return self.config.vocab_size


def vocabulary_table(key: jax.Array, config: ModelConfig) -> nnx.Param:
    """[V, D] with zero rows after the ids that count, so that padding changes no drawn number."""
    assert config.vocab_size is not None
    rows = exact_normal(key, (config.vocab_size, config.hidden_size), config.init_std)
    padding = config.padded_vocab_size - config.vocab_size
    return nnx.Param(jnp.pad(rows, ((0, padding), (0, 0))), axes=("vocab", "embed"), role="embedding")
