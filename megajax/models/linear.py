"""Matrix products on activations.

Shapes: B batch, S sequence, ... features.
"""

from __future__ import annotations

import math

import jax
from jax.ad_checkpoint import checkpoint_name

WEIGHTS = "weights"
"""Name of weights in the form in which a layer uses them."""


def linear(x: jax.Array, weight: jax.Array, contract: int = 1) -> jax.Array:
    """Contract the last `contract` dims of x [B, S, ...] with the first ones of weight -> [B, S, rest of weight].

    The dims of the result are never flattened: where a mesh axis cuts one that is not the first of them, as F of a
    gated [D, 2, F], no flat dim can be cut alike, and the whole weight would be gathered over `tensor`. Compilers make
    the plain product of it after partitioning. The dims that are contracted are cut along the first one, if at all.
    """
    rest = weight.shape[contract:]
    inner = math.prod(weight.shape[:contract])
    matrix = checkpoint_name(weight.reshape(inner, *rest), WEIGHTS)
    flat = x.reshape(*x.shape[: x.ndim - contract], inner)
    return jax.lax.dot_general(flat, matrix, (((flat.ndim - 1,), (0,)), ((), ())))
