"""T5's buckets of distances, compared with values by hand, and the bias that they select.

Shapes: S queries, T keys, N heads, R buckets.
"""

import jax.numpy as jnp
import numpy as np
import pytest

from megajax.models.positions import bucket, relative_bias


def buckets(distances, *, bidirectional, count=32, max_distance=128):
    return np.array(bucket(jnp.array(distances), count, max_distance, bidirectional=bidirectional)).tolist()


def test_keys_before_the_query():
    """Sixteen distances each have their own bucket; from there to 128 buckets grow by a factor of 8^(1/16)."""
    assert buckets(range(0, -16, -1), bidirectional=False) == list(range(16))
    far = [-16, -18, -19, -20, -21, -23, -24, -63, -64, -66, -112, -113, -128, -10_000]
    assert buckets(far, bidirectional=False) == [16, 16, 17, 17, 18, 18, 19, 26, 26, 26, 30, 31, 31, 31]


def test_keys_after_the_query():
    """They are at distance 0 for a decoder; for an encoder they have the upper half of the buckets."""
    assert buckets([1, 5, 1000], bidirectional=False) == [0, 0, 0]
    assert buckets([0, -1, 1, -7, 7, -8, 8], bidirectional=True) == [0, 1, 17, 7, 23, 8, 24]


def test_edges_at_powers_of_two():
    """Where the logarithm is whole, in fp32 as T5 takes it: 16, 32 and 64 open a bucket."""
    assert buckets([-15, -16, -31, -32, -63, -64], bidirectional=True) == [9, 10, 11, 12, 13, 14]


@pytest.mark.parametrize("bidirectional", [True, False])
@pytest.mark.parametrize(("count", "max_distance"), [(4, 8), (8, 20), (32, 128), (64, 256)])
def test_buckets_are_used_up_and_never_go_back(count, max_distance, bidirectional):
    before = buckets(
        range(0, -max_distance - 1, -1), bidirectional=bidirectional, count=count, max_distance=max_distance
    )
    assert before == sorted(before)
    assert before[0] == 0
    assert before[-1] == (count // 2 if bidirectional else count) - 1


def test_bias_of_places():
    """Queries at 2 and 0 in this order, keys at 0, 1 and 2; a bf16 table is taken as it is."""
    table = jnp.arange(8, dtype=jnp.bfloat16)[:, None] * jnp.array([1, 100], jnp.bfloat16)

    bias = relative_bias(table, max_distance=8, bidirectional=True)(np.array([2, 0]), np.array([0, 1, 2]))

    assert (bias.shape, bias.dtype) == ((2, 2, 3), jnp.float32)
    np.testing.assert_array_equal(bias[0], [[2, 1, 0], [0, 5, 6]])
    np.testing.assert_array_equal(bias[1], 100 * bias[0])
