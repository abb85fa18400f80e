"""Fingerprints are the same on every mesh, and different after any change."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from megajax.checkpoint.fingerprint import digits, fingerprint, words

MESH = jax.make_mesh((2, 4), ("a", "b"))
DTYPES = [jnp.float32, jnp.bfloat16, jnp.int32, jnp.uint8, jnp.bool_]


def array_of(shape: tuple[int, ...], dtype: jnp.dtype, seed: int) -> np.ndarray:
    """Random bits as numbers of any kind."""
    bits = np.random.default_rng(seed).integers(0, 256, (*shape, jnp.dtype(dtype).itemsize), np.uint8)
    return (bits & 1).astype(bool)[..., 0] if dtype == jnp.bool_ else bits.view(dtype)[..., 0]


def mark(array: np.ndarray) -> str:
    """Fingerprint of one array."""
    return fingerprint({"x": jnp.asarray(array)})["x"]


def mix(x: int) -> int:
    """MurmurHash3's finalizer on one number."""
    x = (x ^ x >> 16) * 0x85EBCA6B % 2**32
    x = (x ^ x >> 13) * 0xC2B2AE35 % 2**32
    return x ^ x >> 16


def test_is_what_plain_python_makes_of_the_definition() -> None:
    """Checkpoints of years past stay readable only if this never changes."""
    array = np.array([[1.0, -2.5], [0.0, 3e-8]], np.float32)
    first = second = 0
    for (row, column), bits in np.ndenumerate(array.view(np.uint32)):
        position = mix((row * 0x9E3779B1 + 1) % 2**32) ^ mix((column * 0x9E3779B1 + 2) % 2**32)
        first += mix(int(bits)) * (position | 1)
        second += mix(int(bits)) * ((position >> 16 | position << 16) % 2**32 | 1)
    assert mark(array) == f"{first % 2**32:08x}{second % 2**32:08x}"


@settings(max_examples=10)
@given(
    dtype=st.sampled_from(DTYPES),
    shape=st.sampled_from([(8,), (8, 3), (16, 2, 4)]),
    spec=st.sampled_from([P(), P("a"), P("b"), P(("a", "b"))]),
    seed=st.integers(0, 2**32 - 1),
)
def test_is_the_same_on_every_mesh(dtype: jnp.dtype, shape: tuple[int, ...], spec: P, seed: int) -> None:
    array = array_of(shape, dtype, seed)
    assert fingerprint({"x": jax.device_put(array, NamedSharding(MESH, spec))})["x"] == mark(array)


@settings(max_examples=25)
@given(dtype=st.sampled_from(DTYPES), seed=st.integers(0, 2**32 - 1), bit=st.integers(0), places=st.data())
def test_sees_every_flipped_bit_and_every_swap(dtype: jnp.dtype, seed: int, bit: int, places: st.DataObject) -> None:
    array = array_of((4, 6), dtype, seed)
    before, size = mark(array), 1 if dtype == jnp.bool_ else 8 * array.itemsize
    index = places.draw(st.tuples(st.integers(0, 3), st.integers(0, 5)))
    changed = array.copy()
    changed.view(f"u{array.itemsize}")[index] ^= 1 << bit % size
    assert mark(changed) != before
    one, other = places.draw(st.lists(st.integers(0, 3), min_size=2, max_size=2, unique=True))
    swapped = array.copy()
    swapped[[one, other]] = array[[other, one]]
    assert (mark(swapped) == before) == np.array_equal(swapped.view(np.uint8), array.view(np.uint8))


def test_sees_two_elements_of_opposite_sign_swapped() -> None:
    """Their bits differ in one place only, and what differs cancels in a sum that mixes badly."""
    marks = set()
    for place in range(64):
        array = np.ones(64, np.float32)
        array[place] = -1.0
        marks.add(mark(array))
    assert len(marks) == 64


def test_rows_of_zeros_do_not_count() -> None:
    """A vocabulary is padded as the layout needs it."""
    table = array_of((5, 3), jnp.float32, 0)
    assert mark(np.concatenate([table, np.zeros((3, 3), np.float32)])) == mark(table)
    assert mark(np.concatenate([np.zeros((3, 3), np.float32), table])) != mark(table)


@pytest.mark.parametrize("dtype", DTYPES)
def test_scalars(dtype: jnp.dtype) -> None:
    assert mark(np.zeros((), dtype)) == "0" * 16 != mark(np.ones((), dtype))


def test_the_next_step_may_take_the_buffers_at_once() -> None:
    """Nothing waits, and what is computed is of the state before the step."""
    add = jax.jit(lambda x: x + 1, donate_argnums=0)
    state = jnp.zeros(1_000_000) + 1
    expected, pointer = fingerprint({"x": state}), state.unsafe_buffer_pointer()
    pending = words({"x": state})
    state = add(state)
    assert state.unsafe_buffer_pointer() == pointer
    assert digits(pending) == expected != fingerprint({"x": state})
