"""Self-attention with grouped query heads (1706.03762; grouping: 2305.13245).

The query, key and value projections are one matrix laid out by group, [q heads of the group; k; v], as in Megatron's
linear_qkv. So sharding its K groups over `tensor` shards the heads, and a single matmul needs a single gathered input.

Shapes: B batch, S sequence, D embed, K kv heads (= groups), G = N / K query heads a group, N heads, H head dim.
"""

from __future__ import annotations

import jax
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from megajax.config.model import ModelConfig
from megajax.models.attention_kernels import Pattern
from megajax.models.context import Context
from megajax.models.dropout import dropout
from megajax.models.layers import Norm, add_bias, linear
from megajax.models.parameters import normal, zeros
from megajax.models.positions import rotate


class Attention(nnx.Module):
    """Self-attention, with its projections."""

    def __init__(self, key: jax.Array, config: ModelConfig, *, causal: bool = True) -> None:
        """Draw the weights of one layer."""
        self.causal, self.scale, self.softcap = causal, config.attention_scale, config.attention_softcap
        d, k, h = config.hidden_size, config.kv_heads, config.head_size
        group = config.num_heads // k
        qkv_key, out_key = jax.random.split(key)
        self.dropout_rate = config.attention_dropout
        self.qkv = normal(
            qkv_key, (d, k, group + 2, h), config.init_std, ("embed", "kv_heads", "qkv_in_group", "head_dim")
        )
        self.out = normal(
            out_key, (k * group, h, d), config.init_std / (2 * config.num_layers) ** 0.5, ("heads", "head_dim", "embed")
        )
        if config.has_qkv_bias:
            self.qkv_bias = zeros((k, group + 2, h), ("kv_heads", "qkv_in_group", "head_dim"))
        if config.bias:
            self.out_bias = zeros((d,), ("norm",))
        if config.qk_norm:
            self.q_norm = Norm(h, config, axis="head_dim")
            self.k_norm = Norm(h, config, axis="head_dim")

    def project(self, x: jax.Array, context: Context) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Project x [B, S, D] to queries [B, S, N, H], and to keys and values [B, S, K, H], with positions applied."""
        qkv = linear(x, self.qkv[...])
        if hasattr(self, "qkv_bias"):
            qkv = add_bias(qkv, self.qkv_bias[...])
        qkv = context.layout.shard(qkv, "batch", "sequence", "kv_heads", None, None)
        qkv = checkpoint_name(qkv, "qkv")
        q, k, v = qkv[..., :-2, :], qkv[..., -2, :], qkv[..., -1, :]
        q = q.reshape(*q.shape[:2], -1, q.shape[-1])
        if hasattr(self, "q_norm"):
            q, k = self.q_norm(q), self.k_norm(k)
        if (angles := context.kind.angles) is not None:
            q, k = rotate(q, angles), rotate(k, angles)
        return q, k, v

    def pattern(self, context: Context) -> Pattern:
        """Return the attention pattern of the layer with this context."""
        return Pattern(self.causal, context.kind.window, self.scale, context.bias, self.softcap)

    def output(self, heads: jax.Array, context: Context) -> jax.Array:
        """Project the heads' outputs [B, S, N, H] to [B, S, D].

        The bias is replicated over `tensor`, so it is added after the sum over heads.
        """
        y = context.layout.leave_tensor(linear(heads, self.out[...], contract=2))
        return add_bias(y, self.out_bias[...]) if hasattr(self, "out_bias") else y

    def __call__(self, x: jax.Array, context: Context) -> jax.Array:
        """Return the branch [B, S, D] that is added to the residual stream, from a normalised input [B, S, D]."""
        layout = context.layout
        q, k, v = self.project(layout.enter_tensor(x), context)

        def drop(probabilities: jax.Array) -> jax.Array:
            axes = ("batch", "kv_heads", None, "sequence", None)
            return dropout(probabilities, self.dropout_rate, context.keys, "attention", layout, axes, tokens=3)

        dropping = drop if self.dropout_rate else None
        heads = layout.attention(q, k, v, self.pattern(context), context.segment_ids, dropping)
        heads = checkpoint_name(heads, "attention_out")
        return self.output(heads, context)
