"""The encoder-only model; BERT (1810.04805), RoBERTa (1907.11692) and Megatron-LM's BERT differ by switches.

Masked tokens are predicted from the tokens on both sides. With `pair_task` the first token also predicts whether the
two texts of a sample are in their own order or swapped (1909.11942 §3.1: sentence order, which Megatron-LM trains
instead of BERT's next sentence).

Shapes: B batch, S sequence, D embed, V padded vocabulary, P positions, T token types.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from megajax.config.data import DataConfig
from megajax.config.model import ModelConfig
from megajax.models.block import stack_blocks
from megajax.models.context import Context
from megajax.models.layers import ACTIVATIONS, Norm, add_bias, linear
from megajax.models.layout import Layout
from megajax.models.losses import Losses, token_losses
from megajax.models.model import Batch, Model, RowArray, vocabulary_table
from megajax.models.parameters import normal, zeros

PAIR_CLASSES = 2


class Bert(Model):
    """Encoder-only model: embedding, blocks, masked-LM head and, for pairs, pooler and order head."""

    causal = False
    head_transform = True
    sees = "full"

    def __init__(self, key: jax.Array, config: ModelConfig) -> None:
        """Draw all weights; they depend on (key, config) alone, never on the layout."""
        word_key, position_key, type_key, block_key, transform_key, pooler_key, pair_key = jax.random.split(key, 7)
        d, std = config.hidden_size, config.init_std
        self.config = nnx.static(config)
        self.word_embedding = vocabulary_table(word_key, config)
        rows = config.position_rows
        self.position_embedding = normal(position_key, (rows, d), std, ("positions", "embed"), "embedding")
        if config.token_types:
            self.token_type_embedding = normal(type_key, (config.token_types, d), std, ("few", "embed"), "embedding")
        if config.embedding_norm:
            self.embedding_norm = Norm(d, config)
        self.blocks = stack_blocks(block_key, config, causal=self.causal)
        if config.norm_placement == "pre":
            self.final_norm = Norm(d, config)
        self.transform = normal(transform_key, (d, d), std, ("embed", "norm"))
        self.transform_bias = zeros((d,), ("norm",))
        self.transform_norm = Norm(d, config)
        self.head_bias = zeros((config.padded_vocab_size,), ("vocab",))
        if config.pair_task:
            self.pooler = normal(pooler_key, (d, d), std, ("embed", "norm"))
            self.pooler_bias = zeros((d,), ("norm",))
            self.pair_head = normal(pair_key, (d, PAIR_CLASSES), std, ("embed", "few"))
            self.pair_bias = zeros((PAIR_CLASSES,), ("few",))

    @classmethod
    def arrays(cls, config: ModelConfig, data: DataConfig) -> dict[str, RowArray]:
        """Return the arrays of a training batch by name (see `Model.arrays`).

        Among them are token_types and segment_ids, int32 [B, S], and for pairs pair_labels, int32 [B] (-1: none).
        """
        arrays = super().arrays(config, data)
        arrays |= dict.fromkeys(("token_types", "segment_ids"), arrays["tokens"])
        return arrays | ({"pair_labels": RowArray((), np.int32)} if config.pair_task else {})

    def context(self, batch: Batch, layout: Layout, keys: jax.Array | None) -> Context:
        """Return the context of the blocks for a batch, in which padding is a segment of its own."""
        return Context(layout, batch.get("segment_ids"), keys=keys)

    def embed(self, batch: Batch, context: Context) -> jax.Array:
        """Embed tokens [B, S] into the residual stream [B, S, D]."""
        layout, positions = context.layout, batch["positions"] + self.config.position_offset
        x = layout.lookup(
            (self.word_embedding[...], batch["tokens"], "vocab"),
            (self.position_embedding[...], positions, "positions"),
        )
        if self.config.token_types:
            table = layout.weights(self.token_type_embedding)[...]
            x += jax.nn.one_hot(batch["token_types"], len(table), dtype=x.dtype) @ table
        if self.config.embedding_norm:
            x = self.embedding_norm(x)
        return self.drop_embedding(x, context)

    def hidden(self, batch: Batch, context: Context) -> jax.Array:
        """Run the model on tokens [B, S] up to the hidden states [B, S, D] that the heads read."""
        return self.normed(self.run(self.embed(batch, context), context)[0])

    def normed(self, x: jax.Array) -> jax.Array:
        """Normalise the output [B, S, D] of the last block, unless norms after the sums have already normalised it."""
        return self.final_norm(x) if self.config.norm_placement == "pre" else x

    def head_losses(self, x: jax.Array, batch: Batch, context: Context) -> Losses:
        """Return the cross-entropy of the masked tokens and, with `pair_task`, of the order of pairs.

        The latter is weighted by `batch["sample_weights"]` [B].
        """
        x, layout = self.normed(x), context.layout
        predicted = self.transformed(x, layout)
        table, labels, weights = self.word_embedding[...], batch["labels"], batch["weights"]
        masked = layout.cross_entropy(predicted, table, labels, weights, self.vocab_size, self.head_bias[...])
        losses = {"lm loss": masked}
        if self.config.pair_task:
            logits, classes = self.pair_logits(x, layout), jnp.arange(PAIR_CLASSES)
            each, _, _ = token_losses(logits, batch["pair_labels"], classes, PAIR_CLASSES)
            losses["sop loss"] = jnp.sum(each * batch["sample_weights"])
        return losses

    def transformed(self, x: jax.Array, layout: Layout) -> jax.Array:
        """Transform hidden states [B, S, D] for the product with the embedding."""
        y = add_bias(linear(x, layout.weights(self.transform)[...]), self.transform_bias[...])
        return self.transform_norm(ACTIVATIONS[self.config.head_activation or self.config.activation](y))

    def logits(self, x: jax.Array) -> jax.Array:
        """Return fp32 logits [B, S, vocab_size] of hidden states [B, S, D], without padding ids."""
        x, table = self.transformed(x, Layout()), self.word_embedding[: self.vocab_size]
        logits = jnp.einsum("bsd,vd->bsv", x, table, preferred_element_type=jnp.float32)
        return logits + self.head_bias[: self.vocab_size]

    def pair_logits(self, x: jax.Array, layout: Layout) -> jax.Array:
        """Return fp32 logits [B, 2] of a pair's order (as written, swapped) from hidden states [B, S, D]."""
        # The matrix is whole, and so is its gradient: as there are few rows, the compiler would cut the gradient over
        # `tensor` and then move the pieces to their places over `fsdp`.
        pooler = layout.shard(layout.weights(self.pooler)[...], None, None)
        pooled = linear(first_token(x, layout), pooler)
        pooled = jnp.tanh(add_bias(pooled, self.pooler_bias[...]))
        head = layout.weights(self.pair_head)[...]
        return jnp.einsum("bd,dc->bc", pooled, head, preferred_element_type=jnp.float32) + self.pair_bias[...]


def first_token(x: jax.Array, layout: Layout) -> jax.Array:
    """Return the hidden state [B, D] of position 0 from x [B, S, D], whichever device holds it.

    It is computed as a sum, because the compiler cannot split an index.
    """
    is_first = layout.token_order(x.shape[1]) == 0
    return jnp.where(is_first[:, None], x, 0).sum(axis=1)
