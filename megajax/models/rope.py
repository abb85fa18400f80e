"""Rotary position embedding (2104.09864), in the half-rotate layout of Megatron and LLaMA, with angles in fp32.

Shapes: B batch, S sequence, H head dim, R rotated dims (a share of H).
"""

from __future__ import annotations

import math
from dataclasses import replace

import jax
import jax.numpy as jnp

from megajax.config.model import ModelConfig

Angles = tuple[jax.Array, jax.Array]


def rope_angles(positions: jax.Array, config: ModelConfig, *, local: bool = False) -> Angles:
    """Return cosine and sine [B, S, 1, R / 2] of position x frequency, in fp32, because bf16 cannot tell 256 from 257.

    Local layers may have their own base, whose frequencies are not scaled by the factor.
    """
    if local and config.rope_local_base is not None:
        config = replace(config, rope_base=config.rope_local_base, rope_scaling_factor=None)
    angle = positions.astype(jnp.float32)[:, :, None, None] * rope_frequencies(config)
    return jnp.cos(angle), jnp.sin(angle)


def rope_frequencies(config: ModelConfig) -> jax.Array:
    """Return the frequencies base^(-2 i / R), [R / 2] radians per position.

    A scaling factor changes them as in LLaMA 3.1 (2407.21783 §3.2): frequencies of more than `high` turns within the
    original context stay, those of less than `low` turns are divided by the factor, and those in between are
    interpolated.
    """
    rotated = config.rotated_dims
    frequency = config.rope_base ** (-jnp.arange(0, rotated, 2, dtype=jnp.float32) / rotated)
    if config.rope_scaling_factor is None:
        return frequency
    low, high = config.rope_low_frequency, config.rope_high_frequency
    turns = config.rope_original_positions * frequency / (2 * math.pi)
    kept = jnp.clip((turns - low) / (high - low), 0, 1)
    return frequency * (kept + (1 - kept) / config.rope_scaling_factor)


def rotate(x: jax.Array, angles: Angles) -> jax.Array:
    """Rotate the pairs (i, i + R / 2) of every head of x [B, S, heads, H], keeping shape and dtype."""
    cos, sin = angles
    half = cos.shape[-1]
    first, second, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    a, b = first.astype(jnp.float32), second.astype(jnp.float32)
    turned = jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1).astype(x.dtype)
    return jnp.concatenate([turned, rest], axis=-1) if rest.shape[-1] else turned
