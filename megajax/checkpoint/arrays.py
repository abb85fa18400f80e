"""Arrays in files: how Orbax cuts them when it writes, and how they are read back in bounded memory.

A checkpoint's arrays are zarr arrays, uncompressed, of one file per chunk, which any zarr reader opens. Reading is our
own, on TensorStore: Orbax reads whole shards at once, which took twice their memory and two to three times as long.
"""

from __future__ import annotations

import itertools
import math
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
import tensorstore as ts
from etils import epath

from megajax.models.parameters import named_leaves

CHUNK_BYTES = 32 << 20
"""Largest chunk. Larger ones read no faster; malloc reuses buffers only up to this size, and a fresh one costs a page
fault per 4 KiB. Smaller ones make more files."""
READ_AHEAD_BYTES = 4 * CHUNK_BYTES
"""Bytes being read at any time, beyond the arrays that they go into."""

Index = tuple[tuple[int, int], ...]
"""Where a shard lies: start and stop in every dimension."""


def named_arrays(state: Any) -> dict[str, jax.Array]:
    """Every array of a state by its dotted name."""
    return {name: leaf[...] if hasattr(leaf, "get_metadata") else leaf for name, leaf in named_leaves(state)}


def save_args(array: jax.Array) -> ocp.SaveArgs:
    """How Orbax cuts an array into chunks: stacked weights by layer, a table by rows, as far as they need it.

    Chunks that are whole in memory are written without being copied. A table of a prime number of rows stays whole.
    """
    shape = array.sharding.shard_shape(array.shape)
    if math.prod(shape) * array.dtype.itemsize <= CHUNK_BYTES:
        return ocp.SaveArgs()
    if array.ndim > 2:
        return ocp.SaveArgs(chunk_byte_size=CHUNK_BYTES, shard_axes=(0,))
    return ocp.SaveArgs(chunk_byte_size=CHUNK_BYTES if shape[0] % 8 == 0 else None)


def shards(array: jax.Array | jax.ShapeDtypeStruct) -> dict[Index, list[jax.Device]]:
    """What of an array lies on this process's devices: every distinct part, and where."""
    places: dict[Index, list[jax.Device]] = {}
    for device, slices in array.sharding.addressable_devices_indices_map(array.shape).items():
        index = tuple(part.indices(n)[:2] for part, n in zip(slices, array.shape, strict=True))
        places.setdefault(index, []).append(device)
    return places


def empty(index: Index, dtype: Any) -> np.ndarray:
    """Uninitialized memory for a part of an array, aligned such that a CPU device takes it over without a copy."""
    shape = [stop - start for start, stop in index]
    size, alignment = math.prod(shape) * np.dtype(dtype).itemsize, 64
    memory = np.empty(size + alignment, np.uint8)
    start = -memory.ctypes.data % alignment
    return memory[start : start + size].view(dtype).reshape(shape)


def place(leaf: jax.ShapeDtypeStruct, parts: dict[Index, np.ndarray]) -> jax.Array:
    """An array with its sharding, from the parts that this process holds."""
    pieces = [jax.device_put(parts[index], device) for index, devices in shards(leaf).items() for device in devices]
    return jax.make_array_from_single_device_arrays(leaf.shape, leaf.sharding, pieces)


def open_arrays(directory: epath.Path, names: list[str]) -> dict[str, ts.TensorStore]:
    """The stored arrays, to be read. TensorStore knows the same object stores as Orbax."""
    url = directory.as_posix()
    opening = {}
    for name in names:
        where = f"{url}/{name}/" if "://" in url else {"driver": "file", "path": f"{url}/{name}/"}
        spec = {"driver": "zarr", "kvstore": where, "fill_missing_data_reads": False}
        opening[name] = ts.open(spec, open=True, read=True)
    return {name: store.result() for name, store in opening.items()}


def read_arrays(stored: dict[str, ts.TensorStore], wanted: dict[str, jax.ShapeDtypeStruct]) -> dict[str, jax.Array]:
    """Read every process's own shards, chunk by chunk, straight into their place.

    Where `wanted` has more rows than were stored they are zero; where it has fewer the rest is not read. The dtype is
    that in which they were stored.
    """
    arrays: dict[str, jax.Array] = {}
    queue = _Queue()
    for name, leaf in wanted.items():
        store = stored[name]
        leaf = jax.ShapeDtypeStruct(leaf.shape, store.dtype.numpy_dtype, sharding=leaf.sharding)
        parts = {}
        for index in shards(leaf):
            parts[index] = empty(index, leaf.dtype)
            for there, here in _pieces(store, index, parts[index]):
                queue.add(ts.array(here).write(store[there]), here.nbytes)

        def finish(name: str = name, leaf: jax.ShapeDtypeStruct = leaf, parts: dict = parts) -> None:
            arrays[name] = place(leaf, parts)

        queue.then(finish)
    queue.drain(0)
    return arrays


def _pieces(store: ts.TensorStore, index: Index, buffer: np.ndarray) -> Iterator[tuple[tuple, np.ndarray]]:
    """The chunks that a shard is read in: where each lies in the store, and its part of the buffer."""
    stops = [min(stop, n) for (_, stop), n in zip(index, store.shape, strict=True)]
    if buffer.size and any(stop < whole for stop, (_, whole) in zip(stops, index, strict=True)):
        buffer[...] = 0
    chunk = store.chunk_layout.read_chunk.shape or ()  # a scalar has none
    cuts = [
        [(max(at, start), min(at + n, stop)) for at in range(start // n * n, stop, n)]
        for (start, _), stop, n in zip(index, stops, chunk, strict=True)
    ]
    for piece in itertools.product(*cuts):
        there = tuple(slice(*bounds) for bounds in piece)
        here = tuple(slice(a - start, b - start) for (a, b), (start, _) in zip(piece, index, strict=True))
        yield there, buffer[(*here, ...)]


class _Queue:
    """Reads under way, in order, and what follows when those before it are done."""

    def __init__(self) -> None:
        self._waiting: deque[tuple[Callable[[], Any], int]] = deque()
        self._bytes = 0

    def add(self, read: ts.Future, nbytes: int) -> None:
        self._waiting.append((read.result, nbytes))
        self._bytes += nbytes
        self.drain(READ_AHEAD_BYTES)

    def then(self, action: Callable[[], None]) -> None:
        self._waiting.append((action, 0))

    def drain(self, limit: int) -> None:
        """Wait until at most so many bytes are being read."""
        while self._waiting and (self._bytes > limit or limit == 0):
            wait, nbytes = self._waiting.popleft()
            wait()
            self._bytes -= nbytes
