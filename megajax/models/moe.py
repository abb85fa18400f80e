"""Feed-forward half of a block as a mixture of experts (Mixtral: 2401.04088), also with a shared MLP (DeepSeek).

Shapes: B batch, S sequence, D embed, E experts, A = 2 if gated, else 1, F mlp.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx

from megajax.config.model import ModelConfig
from megajax.models.context import Context
from megajax.models.experts import AXES, Weights
from megajax.models.init import normal
from megajax.models.losses import Losses
from megajax.models.mlp import Mlp


class Moe(nnx.Module):
    """Compute a mixture of a router and E experts, and perhaps a shared MLP for all tokens."""

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
