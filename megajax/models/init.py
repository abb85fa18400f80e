"""How parameters are declared: initial value, logical axes and role in one line.

A logical axis names what a dimension is (`embed`, `mlp`, ...); `megajax.parallel.rules` decides which mesh axis it is
sharded over. A role says how the optimizer treats it: only "matrix" and "embedding" decay.
"""

from __future__ import annotations

from typing import Literal

import jax
import jax.numpy as jnp
from flax import nnx

Role = Literal["matrix", "embedding", "bias", "norm"]


def normal(
    key: jax.Array, shape: tuple[int, ...], std: float, axes: tuple[str, ...], role: Role = "matrix"
) -> nnx.Param:
    """Weights drawn from N(0, std^2), fp32."""
    return nnx.Param(std * jax.random.normal(key, shape, jnp.float32), axes=axes, role=role)


def zeros(shape: tuple[int, ...], axes: tuple[str, ...]) -> nnx.Param:
    """A bias."""
    return nnx.Param(jnp.zeros(shape, jnp.float32), axes=axes, role="bias")


def norm_scale(size: int, axis: str) -> nnx.Param:
    """The gain of a norm, all ones."""
    return nnx.Param(jnp.ones((size,), jnp.float32), axes=(axis,), role="norm")


def norm_bias(size: int, axis: str) -> nnx.Param:
    """The shift of a LayerNorm, all zeros."""
    return nnx.Param(jnp.zeros((size,), jnp.float32), axes=(axis,), role="norm")
