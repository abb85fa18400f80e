"""Small parts of layers: matrix products, biases, norms, activations, and the soft cap of scores and logits.

Norms are LayerNorm (1607.06450) and RMSNorm (1910.07467), computed in fp32 whatever the input.

Shapes: B batch, S sequence, ... features, A = 1, or 2 (gate and up) input matrices, F mlp.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from megajax.config.model import Activation, ModelConfig
from megajax.models.parameters import norm_bias, norm_scale

WEIGHTS = "weights"
"""Name, for checkpointing, of weights in the form in which a layer uses them."""


def linear(x: jax.Array, weight: jax.Array, contract: int = 1) -> jax.Array:
    """Contract the last `contract` dims of x [B, S, ...] with the first dims of weight, into [B, S, rest of weight].

    The dims of the result are never flattened. A mesh axis may cut a dim other than the first, such as F of a gated [D,
    2, F]; a flat dim could not be cut in the same way, and the whole weight would be gathered over `tensor`. Compilers
    turn the contraction into a plain matrix product after partitioning. The contracted dims are cut along the first
    one, if at all.
    """
    rest = weight.shape[contract:]
    inner = math.prod(weight.shape[:contract])
    matrix = checkpoint_name(weight.reshape(inner, *rest), WEIGHTS)
    flat = x.reshape(*x.shape[: x.ndim - contract], inner)
    return jax.lax.dot_general(flat, matrix, (((flat.ndim - 1,), (0,)), ((), ())))


def add_bias(x: jax.Array, bias: jax.Array) -> jax.Array:
    """Add bias [...] to x [B, S, ...] in x's dtype, with the bits of a sum in that dtype.

    The gradient of the bias is a sum over tokens. Here it is taken in fp32; in 16 bits it would lose terms that are
    small compared with the sum so far, a tenth of 10,000 tokens.
    """
    return (x.astype(jnp.float32) + bias.astype(jnp.float32)).astype(x.dtype)


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


ACTIVATIONS: dict[Activation, Callable[[jax.Array], jax.Array]] = {
    "gelu": partial(jax.nn.gelu, approximate=True),
    "gelu_exact": partial(jax.nn.gelu, approximate=False),
    "relu": jax.nn.relu,
    "squared_relu": lambda x: jnp.square(jax.nn.relu(x)),
    "swiglu": jax.nn.silu,
    "geglu": partial(jax.nn.gelu, approximate=True),
}
"""Values of `model.activation` -> the activation function, for a gated unit that of its gate."""


def activate(hidden: jax.Array, activation: Activation) -> jax.Array:
    """Apply the activation to hidden [..., A, F] -> [..., F]; if A is 2, multiply by the second part."""
    first = ACTIVATIONS[activation](hidden[..., 0, :])
    return first * hidden[..., 1, :] if hidden.shape[-2] == 2 else first


def capped(logits: jax.Array, softcap: float | None) -> jax.Array:
    """Return c tanh(logits / c) for a cap c (Gemma 2: 2408.00118 §2), or unchanged logits without a cap."""
    return logits if softcap is None else softcap * jnp.tanh(logits / softcap)
