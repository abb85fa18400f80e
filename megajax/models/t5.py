"""The encoder-decoder model: T5 (1910.10683), where 1.0 (ReLU, tied head) and 1.1 (gated GELU, own head) differ by
switches.

Both stacks are scans of blocks. For dropout, layers have consecutive numbers: 0 is the encoder's embedding, 1 ... L are
its blocks, L + 1 is the decoder's embedding, and its blocks follow.

Shapes: B batch, S encoder sequence, T decoder sequence, D embed, N heads, H head dim, R distance buckets, L layers.
"""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from megajax.config.data import DataConfig
from megajax.config.model import ModelConfig
from megajax.models.attention_kernels import Pattern
from megajax.models.block import RESIDUAL, Attend, Block, Remat, keep_all, run_blocks, stack_layers
from megajax.models.context import Context
from megajax.models.dropout import dropout, layer_keys
from megajax.models.layers import Norm, linear
from megajax.models.layout import Layout, attend
from megajax.models.losses import Losses
from megajax.models.model import Batch, Model, RowArray, Stack, vocabulary_table
from megajax.models.parameters import normal
from megajax.models.positions import relative_bias


class T5(Model):
    """Encoder-decoder model: embedding, encoder, decoder and head; `blocks` are the decoder's."""

    sees = "full, in the decoder causal"
    writes = "answer"

    def __init__(self, key: jax.Array, config: ModelConfig) -> None:
        """Draw all weights; they depend on (key, config) alone, never on the layout."""
        word_key, encoder_key, decoder_key, head_key, *bias_keys = jax.random.split(key, 6)
        encoder = replace(config, num_layers=config.encoder_layers or config.num_layers)
        self.config = nnx.static(config)
        self.encoder_layers = encoder.num_layers
        # A tied table is drawn wider by the head's divisor, so that logits start as small as with an own head.
        width = config.hidden_size**0.5 if config.tied_head else 1
        self.word_embedding = vocabulary_table(word_key, replace(config, init_std=config.init_std * width))
        self.encoder_blocks = stack_layers(
            encoder_key, encoder.num_layers, lambda key: Block(key, encoder, causal=False)
        )
        self.encoder_norm = Norm(config.hidden_size, config)
        self.blocks = stack_layers(decoder_key, config.num_layers, lambda key: DecoderBlock(key, config))
        self.final_norm = Norm(config.hidden_size, config)
        shape, axes = (config.relative_buckets, config.num_heads), ("few", "heads")
        self.encoder_bias, self.decoder_bias = (
            normal(key, shape, config.init_std, axes, "embedding") for key in bias_keys
        )
        if not config.tied_head:
            self.head = vocabulary_table(head_key, config)

    @classmethod
    def arrays(cls, config: ModelConfig, data: DataConfig) -> dict[str, RowArray]:
        """Return the arrays of a training batch by name (see `Model.arrays`).

        tokens and segment_ids [B, S] belong to the encoder; decoder_tokens, labels, loss_mask and decoder_segment_ids
        [B, T] belong to the decoder.
        """
        encoder = super().arrays(config, data)
        ids, mask = (RowArray((data.decoder_seq_length,), dtype) for dtype in (np.int32, np.float32))
        return {
            "tokens": encoder["tokens"],
            "segment_ids": encoder["tokens"],
            **dict.fromkeys(("decoder_tokens", "labels", "decoder_segment_ids"), ids),
            "loss_mask": mask,
            "sample_ids": encoder["sample_ids"],
        }

    @classmethod
    def stacks(cls, config: ModelConfig, sequence: int, decoder_sequence: int = 0) -> tuple[Stack, ...]:
        """Return the stacks of encoder and decoder."""
        encoder = Stack(config.encoder_layers or config.num_layers, sequence, causal=False)
        return encoder, Stack(config.num_layers, decoder_sequence, memory=sequence)

    @classmethod
    def decoder_tokens(cls, data: DataConfig) -> int:
        """Return the number T of tokens per sample that the decoder reads."""
        return data.decoder_seq_length

    def context(self, batch: Batch, layout: Layout, keys: jax.Array | None) -> Context:
        """Return the context of the decoder's blocks for a batch, without the encoder's output."""
        bias = relative_bias(self.decoder_bias[...], self.config.relative_max_distance, bidirectional=False)
        return Context(layout, batch.get("decoder_segment_ids"), keys=keys, bias=bias)

    def encode(self, batch: Batch, context: Context, remat: Remat = keep_all) -> Context:
        """Run the encoder and return the decoder's context with its output [B, S, D] as `memory`."""
        bias = relative_bias(self.encoder_bias[...], self.config.relative_max_distance, bidirectional=True)
        inside = context._replace(segment_ids=batch.get("segment_ids"), bias=bias)
        x = self.lookup(batch["tokens"], inside, layer=0)
        with jax.named_scope("encoder"):
            x, _ = run_blocks(self.encoder_blocks, x, inside, remat)
        # The output is gathered here, once for all layers; each layer scatters the gradient of its own part.
        memory = context.layout.enter_tensor(self.encoder_norm(x))
        return context._replace(memory=(memory, inside.segment_ids))

    def embed(self, batch: Batch, context: Context) -> jax.Array:
        """Embed decoder tokens [B, T] into the residual stream [B, T, D]."""
        return self.lookup(batch["decoder_tokens"], context, layer=self.encoder_layers + 1)

    def lookup(self, tokens: jax.Array, context: Context, layer: int) -> jax.Array:
        """Embed tokens [B, S] into the residual stream [B, S, D], with dropout by the keys of `layer`."""
        x = context.layout.lookup((self.word_embedding[...], tokens, "vocab"))
        keys = None if context.keys is None else layer_keys(context.keys, layer)
        return dropout(x, self.config.hidden_dropout, keys, "embedding", context.layout, RESIDUAL)

    def decode(self, batch: Batch, context: Context, remat: Remat = keep_all) -> jax.Array:
        """Run the decoder's blocks in a context with a memory, and return the residual stream [B, T, D]."""
        x = self.embed(batch, context)
        return run_blocks(self.blocks, x, context, remat, first_layer=self.encoder_layers + 1)[0]

    def hidden(self, batch: Batch, context: Context) -> jax.Array:
        """Run the model on the tokens of both sides, up to the normalised hidden states [B, T, D] of the decoder."""
        return self.final_norm(self.decode(batch, self.encode(batch, context)))

    def losses(self, batch: Batch, context: Context, remat: Remat = keep_all) -> Losses:
        """Return all terms of the loss for a batch with weights."""
        context = self.encode(batch, context, remat)
        return self.head_losses(self.decode(batch, context, remat), batch, context)

    def head_losses(self, x: jax.Array, batch: Batch, context: Context) -> Losses:
        """Return the cross-entropy of the decoder's next token."""
        x, labels, weights = self.scaled(self.final_norm(x)), batch["labels"], batch["weights"]
        return {"lm loss": context.layout.cross_entropy(x, self.output_matrix, labels, weights, self.vocab_size)}

    def logits(self, x: jax.Array) -> jax.Array:
        """Return fp32 logits [..., vocab_size] of hidden states [..., D], without padding ids."""
        logits = jnp.einsum("...d,vd->...v", self.scaled(x), self.output_matrix, preferred_element_type=jnp.float32)
        return logits[..., : self.vocab_size]

    def scaled(self, x: jax.Array) -> jax.Array:
        """Scale hidden states for a tied head, because its rows have the length that an embedding needs."""
        return x * self.config.hidden_size**-0.5 if self.config.tied_head else x

    @property
    def output_matrix(self) -> jax.Array:
        """Return the output matrix [V, D], which is the token embedding if the head is tied to it."""
        return self.word_embedding[...] if self.config.tied_head else self.head[...]


class DecoderBlock(Block):
    """Block that attends to the encoder's output between self-attention and MLP."""

    def __init__(self, key: jax.Array, config: ModelConfig) -> None:
        """Draw the weights of one layer."""
        block_key, cross_key = jax.random.split(key)
        super().__init__(block_key, config)
        self.cross_norm = Norm(config.hidden_size, config)
        self.cross = CrossAttention(cross_key, config)

    def residual(
        self, x: jax.Array, context: Context, attend: Attend, cross: Attend | None = None
    ) -> tuple[jax.Array, Losses]:
        """Run the block with `attend` as self-attention (see `Block.residual`) and `cross` as cross-attention."""
        x = checkpoint_name(x, "block_input")
        y = attend(self._branch_input(x, self.attention_norm), context)
        x = self._join(x, y, self.attention_norm, context, "attention_output")
        y = (cross or self.cross)(self._branch_input(x, self.cross_norm), context)
        x = self._join(x, y, self.cross_norm, context, "cross_attention_output")
        return self._feed_forward(x, context)


class CrossAttention(nnx.Module):
    """Attention with queries from the decoder, and keys and values from the encoder's output."""

    def __init__(self, key: jax.Array, config: ModelConfig) -> None:
        """Draw the weights of one layer."""
        d, n, h, std = config.hidden_size, config.num_heads, config.head_size, config.init_std
        q_key, kv_key, out_key = jax.random.split(key, 3)
        self.dropout_rate, self.scale = config.attention_dropout, config.attention_scale
        self.q = normal(q_key, (d, n, h), std, ("embed", "heads", "head_dim"))
        self.kv = normal(kv_key, (d, n, 2, h), std, ("embed", "heads", "qkv_in_group", "head_dim"))
        self.out = normal(out_key, (n, h, d), std / (2 * config.num_layers) ** 0.5, ("heads", "head_dim", "embed"))

    def __call__(self, x: jax.Array, context: Context) -> jax.Array:
        """Return the branch [B, T, D] that is added to the residual stream, from a normalised input [B, T, D]."""
        layout = context.layout
        assert context.memory is not None
        memory, segments = context.memory
        q = layout.shard(linear(layout.enter_tensor(x), self.q[...]), "batch", "sequence", "heads", None)
        kv = linear(layout.enter_tensor(memory), self.kv[...])
        kv = layout.shard(kv, "batch", "sequence", "heads", None, None)
        q, kv = checkpoint_name(q, "qkv"), checkpoint_name(kv, "qkv")

        def drop(probabilities: jax.Array) -> jax.Array:
            axes = ("batch", "heads", None, "sequence", None)
            return dropout(probabilities, self.dropout_rate, context.keys, "cross_attention", layout, axes, tokens=3)

        heads = attend(
            q,
            kv[..., 0, :],
            kv[..., 1, :],
            Pattern(causal=False, scale=self.scale),
            (np.arange(q.shape[1]), np.arange(kv.shape[1])),
            (context.segment_ids, segments),
            drop if self.dropout_rate else None,
        )
        heads = checkpoint_name(heads, "attention_out")
        return layout.leave_tensor(linear(heads, self.out[...], contract=2))
