"""Reading of the arrays that Orbax wrote, straight into their place, and copies of a state that is being written.

Orbax stores an array as zarr (version 2, uncompressed): a directory with `.zarray`, its description, and one file for
every shard that was written, named after the shard's position in the grid of shards ("0.3"), which holds the raw
numbers. Restoring with Orbax took twice the memory of the state and two to three times as long, since TensorStore reads
whole files before it copies what is wanted of them. Plain files need neither: each host reads the rows that its shards
touch, in blocks, whatever the mesh they were written on.

A snapshot is a copy of the state for as long as it is being written, so that the next training step may overwrite its
buffers.
"""

from __future__ import annotations

import itertools
import json
import math
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from etils import epath

from megajax.models.parameters import named_leaves

BLOCK_BYTES = 16 << 20
"""Number of bytes that each of the threads reads at a time."""
THREADS = 8
ARRAYS_AHEAD = 4
Index = tuple[tuple[int, int], ...]
"""Place of a part within an array: start and stop in every dimension."""


def named_arrays(state: Any) -> dict[str, jax.Array]:
    """Return every array of a state by its dotted name."""
    return {name: leaf[...] if hasattr(leaf, "get_metadata") else leaf for name, leaf in named_leaves(state)}


def shards(array: jax.Array | jax.ShapeDtypeStruct) -> dict[Index, list[jax.Device]]:
    """Return every distinct part of an array that lies on devices of this process, with the devices that hold it."""
    places: dict[Index, list[jax.Device]] = {}
    for device, slices in array.sharding.addressable_devices_indices_map(array.shape).items():
        index = tuple(part.indices(n)[:2] for part, n in zip(slices or (), array.shape, strict=True))
        places.setdefault(index, []).append(device)
    return places


def empty(index: Index, dtype: Any) -> np.ndarray:
    """Allocate a part of an array, uninitialized, so aligned that a CPU device takes it over without a copy."""
    shape = [stop - start for start, stop in index]
    size, alignment = math.prod(shape) * np.dtype(dtype).itemsize, 64
    memory = np.empty(size + alignment, np.uint8)
    start = -memory.ctypes.data % alignment
    return memory[start : start + size].view(dtype).reshape(shape)


def place(leaf: jax.ShapeDtypeStruct, parts: dict[Index, np.ndarray]) -> jax.Array:
    """Make an array that has the sharding of `leaf` from the parts that this process holds."""
    pieces = [jax.device_put(parts[index], device) for index, devices in shards(leaf).items() for device in devices]
    return jax.make_array_from_single_device_arrays(leaf.shape, leaf.sharding, pieces)


def read_into(path: epath.Path, offset: int, target: np.ndarray) -> None:
    """Fill contiguous memory from a file.

    Raises:
        OSError: the file cannot be read, or ends too early.
    """
    with path.open("rb") as file:
        file.seek(offset)
        if file.readinto(target.reshape(-1).view(np.uint8)) != target.nbytes:
            raise OSError(f"{path} is too short")


@dataclass(frozen=True)
class StoredArray:
    """An array in files; a scalar is one of shape [1]."""

    path: epath.Path
    shape: tuple[int, ...]
    dtype: np.dtype
    grid: tuple[int, ...]
    """Shape of the shards in which it was written, one file each."""

    @classmethod
    def open(cls, path: epath.Path) -> StoredArray:
        """Read the description of an array.

        Raises:
            OSError, ValueError, LookupError: there is no description, or it is damaged.
        """
        try:
            about = json.loads((path / ".zarray").read_text())
        except ValueError as error:
            raise ValueError(f"{path / '.zarray'}: {error}") from error
        if (about["zarr_format"], about["compressor"], about["order"]) != (2, None, "C"):
            raise ValueError(f"{path} is no uncompressed zarr array")
        return cls(path, tuple(about["shape"]), jnp.dtype(about["dtype"]), tuple(about["chunks"]))

    def blocks(self, index: Index, target: np.ndarray) -> Iterator[Block]:
        """Iterate over the blocks to read for a part of the array into `target`, without what lies beyond the array."""
        if not self.shape:
            yield Block(self.path / "0", ((0, 1),), ((0, 1),), target.reshape(1))
            return
        stops = [min(stop, n) for (_, stop), n in zip(index, self.shape, strict=True)]
        cells = [range(a // n, -(-stop // n)) for (a, _), stop, n in zip(index, stops, self.grid, strict=True)]
        rows = max(1, BLOCK_BYTES // (math.prod(self.grid[1:]) * self.dtype.itemsize))
        for cell in itertools.product(*cells):
            whole = tuple((at * n, at * n + n) for at, n in zip(cell, self.grid, strict=True))
            bounds = zip(index, stops, whole, strict=True)
            (first, last), *others = [(max(a, low), min(stop, high)) for (a, _), stop, (low, high) in bounds]
            for row in range(first, last, rows):
                wanted = ((row, min(row + rows, last)), *others)
                here = tuple(slice(a - base, b - base) for (a, b), (base, _) in zip(wanted, index, strict=True))
                yield Block(self.path / ".".join(map(str, cell)), whole, wanted, target[here])

    def read(self, index: Index) -> np.ndarray:
        """Read a part of the array."""
        part = empty(index, self.dtype)
        for block in self.blocks(index, part):
            block.read()
        return part


@dataclass(frozen=True)
class Block:
    """A few rows of one file that are to be read."""

    path: epath.Path
    whole: Index
    """Part of the array that the file holds."""
    wanted: Index
    target: np.ndarray
    """Memory that the wanted part is read into."""

    def read(self) -> None:
        """Read whole rows from the file, straight into their place if they are wanted whole."""
        (first, last), *columns = self.wanted
        row = [stop - start for start, stop in self.whole[1:]]
        offset = (first - self.whole[0][0]) * math.prod(row) * self.target.itemsize
        if self.wanted[1:] == self.whole[1:] and self.target.flags.c_contiguous:
            read_into(self.path, offset, self.target)
        else:
            rows = np.empty((last - first, *row), self.target.dtype)
            read_into(self.path, offset, rows)
            inner = zip(columns, self.whole[1:], strict=True)
            self.target[...] = rows[(slice(None), *(slice(a - base, b - base) for (a, b), (base, _) in inner))]


def open_arrays(directory: epath.Path, names: Iterable[str]) -> dict[str, StoredArray]:
    """Open the stored arrays of these names; errors are those of `StoredArray.open`."""
    with ThreadPoolExecutor(THREADS) as threads:
        return dict(zip(names, threads.map(StoredArray.open, (directory / name for name in names)), strict=True))


def read_arrays(stored: dict[str, StoredArray], wanted: dict[str, jax.ShapeDtypeStruct]) -> dict[str, jax.Array]:
    """Read the shards that this process holds, a few arrays at a time.

    Where more rows are wanted than were stored, the others are zero. The dtype is the one in which an array was stored.
    """
    arrays: dict[str, jax.Array] = {}
    with ThreadPoolExecutor(THREADS) as threads:
        reading: deque[tuple[str, dict[Index, np.ndarray], list[Future[None]]]] = deque()

        def finish() -> None:
            name, parts, reads = reading.popleft()
            for read in reads:
                read.result()
            leaf = wanted[name]
            arrays[name] = place(jax.ShapeDtypeStruct(leaf.shape, stored[name].dtype, sharding=leaf.sharding), parts)

        for name, leaf in wanted.items():
            parts = {index: empty(index, stored[name].dtype) for index in shards(leaf)}
            if leaf.shape != stored[name].shape:
                for part in parts.values():
                    part[...] = 0
            blocks = (block for index, part in parts.items() for block in stored[name].blocks(index, part))
            reading.append((name, parts, [threads.submit(block.read) for block in blocks]))
            if len(reading) > ARRAYS_AHEAD:
                finish()
        while reading:
            finish()
    return arrays


class Snapshot:
    """Copy of a state; its memory is used again for the next one.

    Only CPU devices need a copy, where Orbax sees the very buffers of the state: while it does, a step that donates
    them copies everything instead (measured: 20 times slower, and another state of memory). From a GPU Orbax itself
    copies to pinned host memory before it returns.
    """

    def __init__(self) -> None:
        self._held: dict[str, jax.Array] = {}
        self._copy: Any = None

    def take(self, arrays: dict[str, jax.Array]) -> dict[str, jax.Array]:
        """Copy the arrays as they are now, over the copy before, which must not be in use any more.

        Fresh memory costs a page fault per 4 KiB: copying 0.5 GB took 0.33 s into fresh and 0.06 s into used memory.
        """
        if jax.default_backend() != "cpu":
            return arrays
        shardings = jax.tree.map(lambda array: array.sharding, arrays)
        if jax.tree.map(_kind, self._held) != jax.tree.map(_kind, arrays):
            self._held = jax.jit(_copies, out_shardings=shardings)(arrays)
            self._copy = jax.jit(_copies_into, out_shardings=shardings, donate_argnums=0, keep_unused=True)
        else:
            self._held = self._copy(self._held, arrays)
        return jax.block_until_ready(self._held)


def _kind(array: jax.Array) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=array.sharding)


def _copies(arrays: dict[str, jax.Array]) -> dict[str, jax.Array]:
    return jax.tree.map(jnp.copy, arrays)


def _copies_into(used: dict[str, jax.Array], arrays: dict[str, jax.Array]) -> dict[str, jax.Array]:
    """Copy the arrays; XLA puts results into the memory of donated arguments."""
    del used
    return _copies(arrays)
