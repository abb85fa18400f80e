"""The feed-forward half of a block: an MLP, or a mixture of experts with or without a shared MLP.

An MLP has GELU (1606.08415), ReLU or a gated linear unit (2002.05202, eq. 6). Mixtures are those of Mixtral
(2401.04088) and, with a shared MLP, of DeepSeek and Qwen.

Shapes: B batch, S sequence, D embed, E experts, F mlp, A = 1, or 2 (gate and up) input matrices.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from megajax.config.model import ModelConfig
from megajax.models.context import Context
from megajax.models.experts import AXES, Weights
from megajax.models.layers import activate, add_bias, linear
from megajax.models.losses import Losses
from megajax.models.parameters import normal, zeros


class Mlp(nnx.Module):
    """Feed-forward layer, which widens, activates and narrows again."""

    def __init__(self, key: jax.Array, config: ModelConfig, size: int | None = None) -> None:
        """Draw the weights of one layer; `size` is F, unset = `config.ffn_size`."""
        d, f = config.hidden_size, size or config.ffn_size
        self.activation = config.activation
        parts = 2 if config.gated else 1
        in_key, out_key = jax.random.split(key)
        self.fc1 = normal(in_key, (d, parts, f), config.init_std, ("embed", "gate_up", "mlp"))
        self.fc2 = normal(out_key, (f, d), config.init_std / (2 * config.num_layers) ** 0.5, ("mlp", "embed"))
        if config.bias:
            self.fc1_bias = zeros((parts, f), ("gate_up", "mlp"))
            self.fc2_bias = zeros((d,), ("norm",))

    def __call__(self, x: jax.Array, context: Context) -> tuple[jax.Array, Losses]:
        """Return the branch [B, S, D] that is added to the residual stream, from a normalised input [B, S, D].

        As in a mixture of experts, the losses that arise inside are returned as well: there are none.
        """
        layout = context.layout
        hidden = linear(layout.enter_tensor(x), self.fc1[...])
        if hasattr(self, "fc1_bias"):
            hidden = add_bias(hidden, self.fc1_bias[...])
        hidden = layout.shard(hidden, "batch", "sequence", None, "mlp")
        hidden = checkpoint_name(hidden, "mlp_hidden")
        hidden = activate(hidden, self.activation)
        y = layout.leave_tensor(linear(hidden, self.fc2[...]))
        return (add_bias(y, self.fc2_bias[...]) if hasattr(self, "fc2_bias") else y), {}


class Moe(nnx.Module):
    """Mixture of a router and E experts, and perhaps a shared MLP for all tokens."""

    def __init__(self, key: jax.Array, config: ModelConfig) -> None:
        """Draw the weights of one layer."""
        d, e, f = config.hidden_size, config.experts, config.expert_size
        parts = 2 if config.gated else 1
        router_key, in_key, out_key, shared_key, gate_key = jax.random.split(key, 5)
        self.config = nnx.static(config)
        self.router = normal(router_key, (d, e), config.init_std, AXES.router)
        self.fc1 = normal(in_key, (e, d, parts, f), config.init_std, AXES.fc1)
        self.fc2 = normal(out_key, (e, f, d), config.init_std / (2 * config.num_layers) ** 0.5, AXES.fc2)
        if config.shared_ffn_size:
            self.shared = Mlp(shared_key, config, config.shared_ffn_size)
            if config.shared_gate:
                self.shared_gate = normal(gate_key, (d,), config.init_std, ("embed",))

    def __call__(self, x: jax.Array, context: Context) -> tuple[jax.Array, Losses]:
        """Return the branch [B, S, D] that is added to the residual stream, from a normalised input [B, S, D].

        The losses of the router are returned as well.
        """
        weights = Weights(self.router[...], self.fc1[...], self.fc2[...])
        y, losses = context.layout.experts(x, weights, context.weights, self.config)
        if hasattr(self, "shared"):
            shared, _ = self.shared(x, context)
            if hasattr(self, "shared_gate"):
                gate = jnp.matmul(x, self.shared_gate[...], preferred_element_type=jnp.float32)
                shared = (shared * jax.nn.sigmoid(gate)[..., None]).astype(x.dtype)
            y += shared
        return y, losses
