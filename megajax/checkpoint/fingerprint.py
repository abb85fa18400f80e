"""Fingerprints of arrays: 64 bits that say whether an array is what was saved, on whatever mesh it lies.

An element contributes a hash of its bits times one of its position in the whole array, modulo 2^32, in two words. So
shards are summed up where they are, and the order of the sum does not matter. An element of zero bits contributes
nothing: rows that pad a vocabulary to the layout may come and go. This guards against broken storage and broken code,
not against forgery.

Shapes: arrays of any shape; N elements along one dimension.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from megajax.checkpoint.arrays import named_arrays
from megajax.processes import in_turn

Words = dict[str, jax.Array]


def fingerprint(state: Any) -> dict[str, str]:
    """Return the fingerprint of every array of a state by its dotted name: 16 hex digits, the same on every layout."""
    return digits(words(named_arrays(state)))


def words(arrays: dict[str, jax.Array]) -> Words:
    """Compute both words of every fingerprint, uint32 [2], in one pass over the arrays that is not waited for."""
    return {name: in_turn(_words(array)) for name, array in arrays.items()}


def digits(values: Words) -> dict[str, str]:
    """Wait for fingerprints and write them in hex; every process has them all and need not ask another."""
    pairs = {name: np.asarray(value.addressable_data(0)) for name, value in values.items()}
    return {name: f"{first:08x}{second:08x}" for name, (first, second) in pairs.items()}


class Tally:
    """Fingerprint of an array of which one part after the other is seen."""

    def __init__(self) -> None:
        self._words = np.zeros(2, np.uint32)

    def add(self, part: np.ndarray, start: tuple[int, ...]) -> None:
        """Add a part of the array, of 32-bit numbers, that begins at the index `start`."""
        self._words += np.asarray(_words(part, np.array(start, np.uint32)))

    def __str__(self) -> str:
        return "".join(f"{word:08x}" for word in self._words)


@jax.jit  # array by array: weights and their moments share a program
def _words(array: jax.Array, start: jax.Array | None = None) -> jax.Array:
    """Compute both words of a part that begins at `start`, or of a whole array."""
    bits = _mix(_bits(array))
    position = _position(bits.shape, start)
    # A product with an odd number is a bijection, so the change of a single element is seen for certain.
    first, second = bits * (position | 1), bits * ((position >> 16 | position << 16) | 1)
    # One reduction for both words, last dimension first: XLA then keeps nothing but the partial sums.
    zero = jnp.uint32(0)
    add = lambda a, b: (a[0] + b[0], a[1] + b[1])  # noqa: E731
    rows = lax.reduce((first, second), (zero, zero), add, (bits.ndim - 1,))
    return jnp.stack([jnp.sum(row, dtype=jnp.uint32) for row in rows])


def _bits(array: jax.Array) -> jax.Array:
    """Return the elements as uint32, at least one-dimensional; an element of 64 bits becomes two."""
    if array.dtype == jnp.bool_:
        array = array.astype(jnp.uint8)
    unsigned = {1: jnp.uint8, 2: jnp.uint16}.get(array.dtype.itemsize, jnp.uint32)
    return jnp.atleast_1d(lax.bitcast_convert_type(array, unsigned)).astype(jnp.uint32)


def _position(shape: tuple[int, ...], start: jax.Array | None) -> jax.Array:
    """Hash every element's position from one hash of each of its indices: no index is ever flattened, so arrays may
    have more than 2^32 elements and a table any number of rows.
    """
    position = jnp.zeros(shape, jnp.uint32)
    for dim, n in enumerate(shape):
        first = 0 if start is None else start[dim]
        index = _mix((first + lax.iota(jnp.uint32, n)) * jnp.uint32(0x9E3779B1) + jnp.uint32(dim + 1))
        position ^= lax.broadcast_in_dim(index, shape, (dim,))
    return position


def _mix(x: jax.Array) -> jax.Array:
    """Apply the finalizer of MurmurHash3 (Appleby, 2011): a bijection in which every bit moves every other."""
    x = (x ^ (x >> 16)) * jnp.uint32(0x85EBCA6B)
    x = (x ^ (x >> 13)) * jnp.uint32(0xC2B2AE35)
    return x ^ (x >> 16)
