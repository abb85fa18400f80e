"""Matrix products on activations, and addition of biases.

Shapes: B batch, S sequence, ... features.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

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
