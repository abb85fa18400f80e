"""Generation with an encoder: prompts are encoded once, and every new token attends to the result.

The keys and values of the encoder's output are the same for all new tokens, so every layer computes them once.

Shapes: B rows, S tokens of a prompt, T new tokens, D embed, L layers, N heads, H head dim.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from megajax.models.attention_kernels import Pattern
from megajax.models.context import Context
from megajax.models.layers import linear
from megajax.models.layout import Layout, attend
from megajax.models.t5 import T5, CrossAttention, DecoderBlock


class Memory(NamedTuple):
    """The encoded prompts in the form that the decoder's layers attend to."""

    keys_values: jax.Array
    """Keys and values [L, B, S, N, 2, H], heads cut over `tensor`."""
    padding: jax.Array
    """Mask [B, S] of the padding, int32, 1 where a prompt has ended."""


def encode_prompts(model: T5, prompts: jax.Array, lengths: jax.Array, layout: Layout) -> Memory:
    """Encode prompts [B, S], padded at the right, of which lengths [B] tokens are real."""
    padding = (jnp.arange(prompts.shape[1]) >= lengths[:, None]).astype(jnp.int32)
    batch = {"tokens": prompts, "segment_ids": padding}
    context = model.encode(batch, model.context(batch, layout, keys=None))
    assert context.memory is not None
    output, _ = context.memory

    def layer(_: None, cross: CrossAttention) -> tuple[None, jax.Array]:
        keys_values = linear(layout.enter_tensor(output), layout.weights(cross).kv[...])
        return None, layout.shard(keys_values, "batch", None, "heads", None, None)

    assert isinstance(model.blocks, DecoderBlock)
    _, keys_values = jax.lax.scan(layer, None, model.blocks.cross)
    return Memory(keys_values, padding)


def look_at(
    cross: CrossAttention, keys_values: jax.Array, padding: jax.Array, x: jax.Array, context: Context
) -> jax.Array:
    """Compute the attention of new tokens [B, T, D] to an encoded prompt, with keys and values [B, S, N, 2, H]."""
    layout = context.layout
    q = layout.shard(linear(layout.enter_tensor(x), cross.q[...]), "batch", None, "heads", None)
    places = jnp.arange(x.shape[1]), jnp.arange(padding.shape[1])
    segments = jnp.zeros(x.shape[:2], jnp.int32), padding
    pattern = Pattern(causal=False, scale=cross.scale)
    heads = attend(q, keys_values[..., 0, :], keys_values[..., 1, :], pattern, places, segments)
    return layout.leave_tensor(linear(heads, cross.out[...], contract=2))
