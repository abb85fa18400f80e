"""The feed-forward half of a block: GELU (1606.08415), ReLU, or a gated linear unit (2002.05202, eq. 6).

Shapes: B batch, S sequence, D embed, F mlp, A = 1, or 2 (gate and up) input matrices.
"""

from __future__ import annotations

import jax
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from megajax.config.model import ModelConfig
from megajax.models.activations import activate
from megajax.models.context import Context
from megajax.models.init import normal, zeros
from megajax.models.linear import add_bias, linear
from megajax.models.losses import Losses


class Mlp(nnx.Module):
    """Compute a feed-forward layer, which widens, activates and narrows again."""

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
