"""One pre-norm transformer block, and many of them as one scan.

Shapes: B batch, S sequence, D embed, L layers.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from megajax.config.model import ModelConfig
from megajax.models.attention import Attention
from megajax.models.context import Context
from megajax.models.dropout import dropout, layer_keys
from megajax.models.mlp import Mlp
from megajax.models.norm import Norm

RESIDUAL = ("batch", "residual_sequence", None)
Attend = Callable[[jax.Array, Context], jax.Array]
Remat = Callable[[Callable[..., jax.Array]], Callable[..., jax.Array]]


class Block(nnx.Module):
    """x + attention(norm(x)), then the same with the MLP."""

    def __init__(self, key: jax.Array, config: ModelConfig) -> None:
        """Draw the weights of one layer."""
        attention_key, mlp_key = jax.random.split(key)
        self.dropout_rate = config.hidden_dropout
        self.attention_norm = Norm(config.hidden_size, config)
        self.attention = Attention(attention_key, config)
        self.mlp_norm = Norm(config.hidden_size, config)
        self.mlp = Mlp(mlp_key, config)

    def __call__(self, x: jax.Array, context: Context) -> jax.Array:
        """[B, S, D] residual stream -> [B, S, D]."""
        return self.residual(x, context, self.attention)

    def residual(self, x: jax.Array, context: Context, attend: Attend) -> jax.Array:
        """The block with its attention replaced by `attend` (decoding attends to a cache)."""
        x = checkpoint_name(x, "block_input")
        branch = attend(self.attention_norm(x), context)
        x = x + dropout(branch, self.dropout_rate, context.keys, "attention_output", context.layout, RESIDUAL)
        x = checkpoint_name(x, "attention_residual")
        branch = self.mlp(self.mlp_norm(x), context)
        return x + dropout(branch, self.dropout_rate, context.keys, "mlp_output", context.layout, RESIDUAL)


def stack_blocks(key: jax.Array, config: ModelConfig) -> Block:
    """All layers as one Block whose weights have a leading dimension L; layer i depends on (key, i) alone."""
    keys = jax.vmap(jax.random.fold_in, (None, 0))(key, jnp.arange(config.num_layers))
    return jax.vmap(lambda k: Block(k, config))(keys)


def run_blocks(
    blocks: Block, x: jax.Array, context: Context, remat: Remat = lambda f: f, first_layer: jax.Array | int = 0
) -> jax.Array:
    """Run stacked blocks one after the other: compile time does not grow with depth.

    Args:
        blocks: stacked, leading dimension L.
        x: [B, S, D] residual stream.
        context: see `Context`; its keys are those of the samples.
        remat: wraps the layer function with the rematerialisation policy.
        first_layer: number of blocks' first layer in the model (a pipeline stage starts further up).
    """

    def layer(x: jax.Array, block: Block, number: jax.Array) -> jax.Array:
        keys = None if context.keys is None else layer_keys(context.keys, number + 1)
        return context.layout.weights(block)(x, context._replace(keys=keys))

    numbers = first_layer + jnp.arange(jax.tree.leaves(blocks)[0].shape[0])
    layer = remat(layer)
    x, _ = jax.lax.scan(lambda x, inputs: (layer(x, *inputs), None), x, (blocks, numbers))
    return x
