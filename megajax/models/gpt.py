"""The decoder-only model; GPT-2/3, LLaMA, Mistral, Qwen, Gemma, BLOOM and mixtures differ by switches.

Shapes: B batch, S sequence, D embed, V padded vocabulary, P positions.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx

from megajax.config.data import DataConfig
from megajax.config.model import ModelConfig
from megajax.models.block import Block, stack_layers
from megajax.models.context import Context, Kind
from megajax.models.layers import Norm, capped
from megajax.models.layout import Layout, Table
from megajax.models.losses import Losses
from megajax.models.model import Batch, Model, RowArray, vocabulary_table
from megajax.models.parameters import normal
from megajax.models.positions import alibi, rope_angles


class Gpt(Model):
    """Decoder-only model: embedding, blocks, final norm and head."""

    writes = "continuation"

    def __init__(self, key: jax.Array, config: ModelConfig) -> None:
        """Draw all weights; they depend on (key, config) alone, never on the layout."""
        word_key, position_key, block_key, head_key = jax.random.split(key, 4)
        self.config = nnx.static(config)
        self.word_embedding = vocabulary_table(word_key, config)
        if config.positions == "learned":
            shape = (config.max_positions, config.hidden_size)
            self.position_embedding = normal(position_key, shape, config.init_std, ("positions", "embed"), "embedding")
        if config.embedding_norm:
            self.embedding_norm = Norm(config.hidden_size, config)
        if config.dense_layers:
            dense_key, block_key = jax.random.split(block_key)
            self.dense_blocks = stack_layers(dense_key, config.dense_layers, lambda key: Block(key, config, dense=True))
        self.blocks = stack_layers(block_key, config.num_layers - config.dense_layers, lambda key: Block(key, config))
        self.final_norm = Norm(config.hidden_size, config)
        if not config.tied_head:
            self.head = vocabulary_table(head_key, config)

    @classmethod
    def arrays(cls, config: ModelConfig, data: DataConfig) -> dict[str, RowArray]:
        """Return the arrays of a training batch by name (see `Model.arrays`).

        segment_ids are among them if documents or conversations must not attend to each other.
        """
        arrays = super().arrays(config, data)
        apart = data.reset_attention or data.kind == "instruction"
        return arrays | ({"segment_ids": arrays["tokens"]} if apart else {})

    def context(self, batch: Batch, layout: Layout, keys: jax.Array | None) -> Context:
        """Return the context of the blocks for a batch."""
        config = self.config
        bias = alibi(config.num_heads) if config.positions == "alibi" else None
        weights = batch.get("weights") if config.experts else None
        return Context(layout, batch.get("segment_ids"), keys, weights, bias, kinds=self._kinds(batch))

    def _kinds(self, batch: Batch) -> tuple[Kind, ...]:
        """Return the kind of every layer of the pattern, with its window and angles for a batch."""
        config = self.config
        angles = rope_angles(batch["positions"], config) if config.positions == "rope" else None
        kinds = {"global": Kind(None, angles), "local": Kind(config.window, angles)}
        if config.rope_local_base is not None:
            kinds["local"] = Kind(config.window, rope_angles(batch["positions"], config, local=True))
        return tuple(kinds[name] for name in config.kind_pattern)

    @property
    def trunk(self) -> tuple[Block, ...]:
        """Return the blocks between embedding and head (see `Model.trunk`): dense ones, then those with experts."""
        return (self.dense_blocks, self.blocks) if self.config.dense_layers else (self.blocks,)

    def embed(self, batch: Batch, context: Context) -> jax.Array:
        """Embed tokens [B, S] into the residual stream [B, S, D]."""
        tables: list[Table] = [(self.word_embedding[...], batch["tokens"], "vocab")]
        if self.config.positions == "learned":
            tables.append((self.position_embedding[...], batch["positions"], "positions"))
        x = context.layout.lookup(*tables)
        if self.config.embedding_scale:
            x *= jnp.asarray(self.config.hidden_size**0.5, x.dtype)
        if self.config.embedding_norm:
            x = self.embedding_norm(x)
        return self.drop_embedding(x, context)

    def hidden(self, batch: Batch, context: Context) -> jax.Array:
        """Run the model on tokens [B, S] up to the normalised hidden states [B, S, D] that the head reads."""
        return self.final_norm(self.run(self.embed(batch, context), context)[0])

    def head_losses(self, x: jax.Array, batch: Batch, context: Context) -> Losses:
        """Return the cross-entropy of the next token."""
        x = self.final_norm(x)
        of_head = (self.output_matrix, batch["labels"], batch["weights"], self.vocab_size)
        return {"lm loss": context.layout.cross_entropy(x, *of_head, softcap=self.config.logit_softcap)}

    def logits(self, x: jax.Array) -> jax.Array:
        """Return fp32 logits [..., vocab_size] of hidden states [..., D], without padding ids."""
        logits = jnp.einsum("...d,vd->...v", x, self.output_matrix, preferred_element_type=jnp.float32)
        logits = logits[..., : self.vocab_size]  # a slice of the table instead would gather it over `tensor`
        return capped(logits, self.config.logit_softcap)

    @property
    def output_matrix(self) -> jax.Array:
        """Return the output matrix [V, D], which is the token embedding if the head is tied to it (1608.05859)."""
        return self.word_embedding[...] if self.config.tied_head else self.head[...]
