"""Declaration of parameters: initial value, logical axes and role in one line.

A logical axis names the meaning of a dimension (`embed`, `mlp`, ...); `megajax.parallel.rules` decides over which mesh
axis it is sharded. A role decides how the optimizer treats a parameter: weight decay acts on "matrix" and "embedding"
alone.
"""

from __future__ import annotations

from functools import cache
from statistics import NormalDist
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

Role = Literal["matrix", "embedding", "bias", "norm"]


def normal(
    key: jax.Array, shape: tuple[int, ...], std: float, axes: tuple[str, ...], role: Role = "matrix"
) -> nnx.Param:
    """Draw weights from N(0, std^2), fp32."""
    return nnx.Param(exact_normal(key, shape, std), axes=axes, role=role)


def zeros(shape: tuple[int, ...], axes: tuple[str, ...]) -> nnx.Param:
    """Make a bias, all zeros."""
    return nnx.Param(jnp.zeros(shape, jnp.float32), axes=axes, role="bias")


def norm_scale(size: int, axis: str, value: float = 1.0) -> nnx.Param:
    """Make the gain of a norm, all ones unless another value is given."""
    return nnx.Param(jnp.full((size,), value, jnp.float32), axes=(axis,), role="norm")


def norm_bias(size: int, axis: str) -> nnx.Param:
    """Make the shift of a LayerNorm, all zeros."""
    return nnx.Param(jnp.zeros((size,), jnp.float32), axes=(axis,), role="norm")


def exact_normal(key: jax.Array, shape: tuple[int, ...], std: float) -> jax.Array:
    """Draw numbers from N(0, std^2) whose bits depend on key, shape and std, but not on sharding, compiler or device.

    `jax.random.normal` evaluates a polynomial, which compilers round differently in the middle and at the edge of a
    shard. Here a number is (a + b) * constant: two rounded operations that compilers cannot change. The halves of 32
    random bits select a and b from a table of 2^16 normal quantiles, which gives 2^32 values up to 6.1 standard
    deviations.
    """
    bits = jax.random.bits(key, shape, jnp.uint32)
    table = jnp.asarray(_quantiles())
    return (table[bits >> 16] + table[bits & 0xFFFF]) * jnp.float32(std * 0.5**0.5)


@cache
def _quantiles() -> np.ndarray:
    """Return the centres of 2^16 equally likely slices of N(0, 1), scaled to variance 1."""
    inverse = NormalDist().inv_cdf
    values = np.array([inverse((i + 0.5) / 2**16) for i in range(2**16)])
    return (values / values.std()).astype(np.float32)
