"""Matrix products on activations.

Shapes: B batch, S sequence, ... features.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp


def linear(x: jax.Array, weight: jax.Array, contract: int = 1) -> jax.Array:
    """Contract the last `contract` dims of x [B, S, ...] with the first ones of weight -> [B, S, rest of weight].

    Feature dims are flattened first, so that every backend sees the plain [B, S, in] x [in, out] product.
    """
    rest = weight.shape[contract:]
    inner = math.prod(weight.shape[:contract])
    y = jnp.matmul(x.reshape(*x.shape[: x.ndim - contract], inner), weight.reshape(inner, -1))
    return y.reshape(*y.shape[:-1], *rest)
