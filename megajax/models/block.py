"""One transformer block, and many of them as one scan.

Shapes: B batch, S sequence, D embed, L layers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from megajax.config.model import ModelConfig
from megajax.models.attention import Attention
from megajax.models.context import Context
from megajax.models.dropout import Site, dropout, layer_keys
from megajax.models.losses import Losses
from megajax.models.mlp import Mlp
from megajax.models.moe import Moe
from megajax.models.norm import Norm

RESIDUAL = ("batch", "residual_sequence", None)
Attend = Callable[[jax.Array, Context], jax.Array]
Branch = Callable[[jax.Array], jax.Array]
Remat = Callable[[Callable[..., Any]], Callable[..., Any]]
M = TypeVar("M", bound=nnx.Module)


class Block(nnx.Module):
    """x + attention(norm(x)), then the same with the MLP; with norms after the sums, norm(x + attention(x))."""

    def __init__(self, key: jax.Array, config: ModelConfig, *, causal: bool = True) -> None:
        """Draw the weights of one layer."""
        attention_key, mlp_key = jax.random.split(key)
        self.dropout_rate = config.hidden_dropout
        self.pre_norm = config.norm_placement == "pre"
        self.attention_norm = Norm(config.hidden_size, config)
        self.attention = Attention(attention_key, config, causal=causal)
        self.mlp_norm = Norm(config.hidden_size, config)
        self.mlp = Moe(mlp_key, config) if config.experts else Mlp(mlp_key, config)

    def __call__(self, x: jax.Array, context: Context) -> tuple[jax.Array, Losses]:
        """[B, S, D] residual stream -> [B, S, D], and the losses that arise inside."""
        return self.residual(x, context, self.attention)

    def residual(self, x: jax.Array, context: Context, attend: Attend) -> tuple[jax.Array, Losses]:
        """The block with its attention replaced by `attend` (decoding attends to a cache)."""
        x = checkpoint_name(x, "block_input")
        x = self._join(x, lambda x: attend(x, context), self.attention_norm, context, "attention_output")
        return self._feed_forward(x, context)

    def _feed_forward(self, x: jax.Array, context: Context) -> tuple[jax.Array, Losses]:
        """The residual stream after the MLP, and what a mixture asks of its router."""
        losses: Losses = {}

        def branch(x: jax.Array) -> jax.Array:
            nonlocal losses
            if isinstance(self.mlp, Mlp):
                return self.mlp(x, context)
            y, losses = self.mlp(x, context)
            return y

        return self._join(x, branch, self.mlp_norm, context, "mlp_output"), losses

    def _join(self, x: jax.Array, branch: Branch, norm: Norm, context: Context, site: Site) -> jax.Array:
        """The residual stream after a branch.

        The sum is worth keeping before it is normalised: with norms after the sums their backward pass would compute
        the last product of the branch again, and reduce-scatter it over `tensor` again.
        """
        y = branch(norm(x) if self.pre_norm else x)
        x = x + dropout(y, self.dropout_rate, context.keys, site, context.layout, RESIDUAL)
        x = checkpoint_name(x, "mlp_residual" if site == "mlp_output" else "attention_residual")
        return x if self.pre_norm else norm(x)


def stack_blocks(key: jax.Array, config: ModelConfig, *, causal: bool = True) -> Block:
    """All layers as one Block whose weights have a leading dimension L; layer i depends on (key, i) alone."""
    return stack_layers(key, config.num_layers, lambda key: Block(key, config, causal=causal))


def stack_layers(key: jax.Array, count: int, layer: Callable[[jax.Array], M]) -> M:
    """`count` modules as one whose weights have a leading dimension; the i-th depends on (key, i) alone."""
    return jax.vmap(layer)(jax.vmap(jax.random.fold_in, (None, 0))(key, jnp.arange(count)))


def run_blocks(
    blocks: nnx.Module, x: jax.Array, context: Context, remat: Remat = lambda f: f, first_layer: jax.Array | int = 0
) -> tuple[jax.Array, Losses]:
    """Run stacked blocks one after the other: compile time does not grow with depth.

    Args:
        blocks: stacked, leading dimension L.
        x: [B, S, D] residual stream.
        context: see `Context`; its keys are those of the samples.
        remat: wraps the layer function with the rematerialisation policy.
        first_layer: number of blocks' first layer in the model (a pipeline stage starts further up).

    Returns:
        [B, S, D], and the sums over the layers of the losses that arise inside.
    """

    def layer(x: jax.Array, block: Any, number: jax.Array) -> tuple[jax.Array, Losses]:
        keys = None if context.keys is None else layer_keys(context.keys, number + 1)
        return context.layout.weights(block)(x, context._replace(keys=keys))

    numbers = first_layer + jnp.arange(jax.tree.leaves(blocks)[0].shape[0])
    layer = remat(layer)
    with jax.named_scope("layers"):  # the loop's name in profiles and compiled programs
        x, losses = jax.lax.scan(lambda x, inputs: layer(x, *inputs), x, (blocks, numbers))
    return x, jax.tree.map(lambda loss: loss.sum(0), losses)
