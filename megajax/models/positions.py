"""Positions in attention: rotary embedding, a bias that falls with distance, and a bias by buckets of distances.

Rotary embedding (2104.09864) is in the half-rotate layout of Megatron and LLaMA, with angles in fp32. In T5's bias by
buckets (1910.10683 §2.1) near distances have a bucket each, and far distances share buckets.

Shapes: B batch, S sequence or queries, T keys, N heads, H head dim, R rotated dims (a share of H); in biases R buckets.
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np

from megajax.config.model import ModelConfig
from megajax.models.attention_kernels import Bias, Places

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


def alibi(heads: int) -> Bias:
    """Return a bias that lowers scores with distance, at a different rate in every head (2108.12409 §3).

    The rates are 2^(-8 n / N) for a power of two N. For another N, the remaining heads take every second rate of the
    next power of two.
    """
    power = 2 ** (heads.bit_length() - 1)
    rates = [2 ** (-8 * n / power) for n in range(1, power + 1)]
    rates += [2 ** (-4 * n / power) for n in range(1, 2 * (heads - power) + 1, 2)]
    slopes = np.array(rates, np.float32)[:, None, None]

    def bias(q_places: Places, k_places: Places) -> jax.Array:
        distance = jnp.asarray(k_places)[..., None, None, :] - jnp.asarray(q_places)[..., None, :, None]
        return jnp.asarray(slopes) * distance.astype(jnp.float32)

    return bias


def relative_bias(table: jax.Array, max_distance: int, *, bidirectional: bool) -> Bias:
    """Return the attention bias of a stack of layers.

    Args:
        table: number that each head adds to the scores of a bucket, [R, N].
        max_distance: distance from which on all distances are in the last bucket.
        bidirectional: whether half of the buckets are for keys after the query; otherwise these count as distance 0.
    """
    table = table.astype(jnp.float32)  # cast here, so that the gradients of all layers are summed in fp32

    def bias(q_places: Places, k_places: Places) -> jax.Array:
        distance = jnp.asarray(k_places)[..., None, :] - jnp.asarray(q_places)[..., :, None]
        one_hot = jax.nn.one_hot(bucket(distance, len(table), max_distance, bidirectional=bidirectional), len(table))
        # This product only selects numbers, so it must not round them.
        highest = jax.lax.Precision.HIGHEST
        return jnp.einsum("...str,rn->...nst", one_hot, table, precision=highest)

    return bias


def bucket(distance: jax.Array, buckets: int, max_distance: int, *, bidirectional: bool) -> jax.Array:
    """Return the bucket of every distance (key place - query place), int32 in [0, buckets)."""
    if bidirectional:
        half = buckets // 2
        return bucket(-jnp.abs(distance), half, max_distance, bidirectional=False) + half * (distance > 0)
    first = _first_distances(buckets, max_distance)
    return (-distance[..., None] >= first[1:]).sum(axis=-1)


@cache
def _first_distances(buckets: int, max_distance: int) -> np.ndarray:
    """Return the smallest distance of each bucket, [buckets].

    Each bucket of the first half holds one distance (0, 1, 2, ...); buckets of the second half grow up to
    `max_distance`.
    """
    exact = buckets // 2
    distance = np.arange(max_distance + 1, dtype=np.float32)
    # The order of the fp32 operations matters, because the edges are where the logarithm is nearly whole.
    share = np.log(np.maximum(distance, 1) / exact) / np.float32(np.log(max_distance / exact))
    far = exact + (share * (buckets - exact)).astype(np.int32)
    return np.searchsorted(np.where(distance < exact, distance, np.minimum(far, buckets - 1)), np.arange(buckets))
