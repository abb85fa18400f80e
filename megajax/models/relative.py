"""Attention bias by buckets of distances (T5: 1910.10683 §2.1); near distances have a bucket each, far ones share.

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
