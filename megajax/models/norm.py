"""LayerNorm (1607.06450) and RMSNorm (1910.07467), computed in fp32 whatever the input."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx

from megajax.config.model import ModelConfig
from megajax.models.init import norm_bias, norm_scale


class Norm(nnx.Module):
    """Normalise the last dimension, with a learned gain and, for LayerNorm, a learned shift."""

    def __init__(self, size: int, config: ModelConfig, axis: str = "norm") -> None:
        """Create the parameters for a dimension of the given `size` and logical `axis`."""
        self.eps = config.norm_eps
        self.centered = config.norm == "layernorm"
        self.plus_one = config.norm_plus_one
        self.scale = norm_scale(size, axis, 0.0 if self.plus_one else 1.0)
        if self.centered:
            self.bias = norm_bias(size, axis)

    def __call__(self, x: jax.Array) -> jax.Array:
        """Normalise x [..., size] and return the result in the same shape and dtype."""
        y = x.astype(jnp.float32)
        if self.centered:
            y = y - jnp.mean(y, axis=-1, keepdims=True)
        y = y * jax.lax.rsqrt(jnp.mean(jnp.square(y), axis=-1, keepdims=True) + self.eps)
        scale = self.scale[...].astype(jnp.float32)
        y = y * (1 + scale if self.plus_one else scale)
        if self.centered:
            y = y + self.bias[...].astype(jnp.float32)
        return y.astype(x.dtype)
