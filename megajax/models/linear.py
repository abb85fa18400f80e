"""Matrix products on activations.

Shapes: B batch, S sequence, ... features.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

WEIGHTS = "weights"
"""Name of weights in the form in which a layer uses them."""


def linear(x: jax.Array, weight: jax.Array, contract: int = 1) -> jax.Array:
    """Contract the last `contract` dims of x [B, S, ...] with the first ones of weight -> [B, S, rest of weight].

    Feature dims are flattened first, so that every backend sees the plain [B, S, in] x [in, out] product.
    """
    rest = weight.shape[contract:]
    inner = math.prod(weight.shape[:contract])
    matrix = checkpoint_name(weight.reshape(inner, -1), WEIGHTS)
    y = jnp.matmul(x.reshape(*x.shape[: x.ndim - contract], inner), matrix)
    return y.reshape(*y.shape[:-1], *rest)
