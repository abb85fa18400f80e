"""The feed-forward half of a block: GELU (1606.08415, tanh form) or SwiGLU (2002.05202, eq. 6).

Shapes: B batch, S sequence, D embed, F mlp, A = 1 (gelu) or 2 (swiglu: gate and up) input matrices.
"""

from __future__ import annotations

import jax
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from megajax.config.model import ModelConfig
from megajax.models.context import Context
from megajax.models.init import normal, zeros
from megajax.models.linear import linear


class Mlp(nnx.Module):
    """Widen, activate, narrow."""

    def __init__(self, key: jax.Array, config: ModelConfig) -> None:
        """Draw the weights of one layer."""
        d, f = config.hidden_size, config.ffn_size
        parts = 2 if config.activation == "swiglu" else 1
        in_key, out_key = jax.random.split(key)
        self.fc1 = normal(in_key, (d, parts, f), config.init_std, ("embed", "gate_up", "mlp"))
        self.fc2 = normal(out_key, (f, d), config.init_std / (2 * config.num_layers) ** 0.5, ("mlp", "embed"))
        if config.bias:
            self.fc1_bias = zeros((parts, f), ("gate_up", "mlp"))
            self.fc2_bias = zeros((d,), ("norm",))

    def __call__(self, x: jax.Array, context: Context) -> jax.Array:
        """[B, S, D] normalised input -> [B, S, D] branch that joins the residual stream."""
        layout = context.layout
        hidden = linear(layout.enter_tensor(x), self.fc1[...])
        if hasattr(self, "fc1_bias"):
            hidden += self.fc1_bias[...]
        hidden = layout.shard(hidden, "batch", "sequence", None, "mlp")
        hidden = checkpoint_name(hidden, "mlp_hidden")
        if hidden.shape[-2] == 2:
            hidden = jax.nn.silu(hidden[..., 0, :]) * hidden[..., 1, :]
        else:
            hidden = jax.nn.gelu(hidden[..., 0, :], approximate=True)
        y = layout.leave_tensor(linear(hidden, self.fc2[...]))
        return y + self.fc2_bias[...] if hasattr(self, "fc2_bias") else y
