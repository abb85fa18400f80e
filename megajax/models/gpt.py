"""The decoder-only transformer: GPT-2/3 and LLaMA are switches of the same module.

Shapes: B batch, S sequence, D embed, V padded vocabulary, P positions.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx

from megajax.config.model import ModelConfig
from megajax.models.block import RESIDUAL, Remat, run_blocks, stack_blocks
from megajax.models.context import Context
from megajax.models.dropout import dropout, layer_keys
from megajax.models.init import exact_normal, normal
from megajax.models.layout import Layout, Table
from megajax.models.norm import Norm
from megajax.models.rope import rope_angles


class Gpt(nnx.Module):
    """Embedding, blocks, final norm, head."""

    def __init__(self, key: jax.Array, config: ModelConfig) -> None:
        """Draw all weights; they depend on (key, config) alone, never on the layout."""
        word_key, position_key, block_key, head_key = jax.random.split(key, 4)
        self.config = nnx.static(config)
        self.word_embedding = vocabulary_table(word_key, config)
        if config.positions == "learned":
            shape = (config.max_positions, config.hidden_size)
            self.position_embedding = normal(position_key, shape, config.init_std, ("positions", "embed"), "embedding")
        self.blocks = stack_blocks(block_key, config)
        self.final_norm = Norm(config.hidden_size, config)
        if not config.tied_head:
            self.head = vocabulary_table(head_key, config)

    def context(self, batch: dict[str, jax.Array], layout: Layout, keys: jax.Array | None) -> Context:
        """What the blocks need to know of a batch: see `megajax.data.batch` for its arrays."""
        angles = rope_angles(batch["positions"], self.config) if self.config.positions == "rope" else None
        return Context(layout, batch.get("segment_ids"), angles, keys)

    def embed(self, batch: dict[str, jax.Array], context: Context) -> jax.Array:
        """Tokens [B, S] -> residual stream [B, S, D]."""
        layout = context.layout
        tables: list[Table] = [(self.word_embedding[...], batch["tokens"], "vocab")]
        if self.config.positions == "learned":
            tables.append((self.position_embedding[...], batch["positions"], "positions"))
        x = layout.lookup(*tables)
        keys = None if context.keys is None else layer_keys(context.keys, 0)
        return dropout(x, self.config.hidden_dropout, keys, "embedding", layout, RESIDUAL)

    def hidden(self, batch: dict[str, jax.Array], context: Context) -> jax.Array:
        """Tokens [B, S] -> normalised hidden states [B, S, D] before the head."""
        return self.final_norm(run_blocks(self.blocks, self.embed(batch, context), context))

    def loss(
        self, batch: dict[str, jax.Array], weights: jax.Array, context: Context, remat: Remat = lambda f: f
    ) -> jax.Array:
        """Sum over tokens of weight [B, S] x cross-entropy of the label, scalar fp32."""
        x = run_blocks(self.blocks, self.embed(batch, context), context, remat)
        return self.head_loss(x, batch["labels"], weights, context.layout)

    def head_loss(self, x: jax.Array, labels: jax.Array, weights: jax.Array, layout: Layout) -> jax.Array:
        """The last part of `loss`, from the residual stream [B, S, D] after the last block."""
        return layout.cross_entropy(self.final_norm(x), self.output_matrix, labels, weights, self.vocab_size)

    def logits(self, x: jax.Array) -> jax.Array:
        """Hidden states [..., D] -> fp32 logits [..., vocab_size] of the ids that count."""
        head = self.output_matrix[: self.vocab_size]
        return jnp.einsum("...d,vd->...v", x, head, preferred_element_type=jnp.float32)

    @property
    def output_matrix(self) -> jax.Array:
        """[V, D], the token embedding when the head is tied to it (1608.05859)."""
        return self.word_embedding[...] if self.config.tied_head else self.head[...]

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
