"""Attention bias of distances in buckets (T5: 1910.10683 §2.1): near ones each have their own, far ones share.

Shapes: S queries, T keys, N heads, R buckets.
"""

from __future__ import annotations

from functools import cache

import jax
import jax.numpy as jnp
import numpy as np

from megajax.models.attention_kernels import Bias, Places


def relative_bias(table: jax.Array, max_distance: int, *, bidirectional: bool) -> Bias:
    """Return the attention bias of a stack of layers.

    Args:
        table: [R, N] number that each head adds to the scores of a bucket.
        max_distance: distances from here on are in the last bucket.
        bidirectional: half of the buckets are for keys after the query; else those count as distance 0.
    """
    table = table.astype(jnp.float32)  # out here, so that the gradients of all layers are summed up in fp32

    def bias(q_places: Places, k_places: Places) -> jax.Array:
        distance = jnp.asarray(k_places)[..., None, :] - jnp.asarray(q_places)[..., :, None]
        one_hot = jax.nn.one_hot(bucket(distance, len(table), max_distance, bidirectional=bidirectional), len(table))
        # A product that only selects must not round what it selects.
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

    Each bucket of the first half holds one distance: 0, 1, 2, ...; those of the second half are ever wider, up to
    `max_distance`.
    """
    exact = buckets // 2
    distance = np.arange(max_distance + 1, dtype=np.float32)
    # In fp32 and in this order, since the edges fall where the logarithm is all but whole.
    share = np.log(np.maximum(distance, 1) / exact) / np.float32(np.log(max_distance / exact))
    far = exact + (share * (buckets - exact)).astype(np.int32)
    return np.searchsorted(np.where(distance < exact, distance, np.minimum(far, buckets - 1)), np.arange(buckets))
