"""Arrays on disk: mapped files, and a cache of slowly computed arrays under the hash of all their inputs.

A key names the contents, so a cached array is never stale: other data, another seed or length gives another key. Files
appear by rename only, so any number of processes may build the same key at once; all of them write the same bytes.
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import mmap
import os
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from megajax.files import atomic_write, remove_leftovers

log = logging.getLogger(__name__)

_LIBC = ctypes.CDLL(None, use_errno=True)
_LIBC.mmap.restype = ctypes.c_void_p
_LIBC.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
_LIBC.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_FAILED = ctypes.c_void_p(-1).value


def map_file(path: Path) -> np.ndarray:
    """Map the bytes of a file, uint8, read-only and through the page cache.

    No file descriptor stays open. Python's own mmap (and with it `numpy.memmap`) keeps one per file before version
    3.13, and a mix of some hundred sources, with two token files and three cached arrays each, would run out of them.

    Raises:
        OSError: the file cannot be opened or mapped.
    """
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        if not size:  # an empty file cannot be mapped
            return np.empty(0, np.uint8)
        address = _LIBC.mmap(None, size, mmap.PROT_READ, mmap.MAP_SHARED, file.fileno(), 0)
    if address == _FAILED:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), str(path))
    memory = (ctypes.c_ubyte * size).from_address(address)
    weakref.finalize(memory, _LIBC.munmap, address, size).atexit = False  # threads may read until the very end
    return np.frombuffer(memoryview(memory).toreadonly(), np.uint8)


def map_array(path: Path) -> np.ndarray:
    """Map the array in a .npy file that `numpy.save` wrote.

    Raises:
        OSError: the file cannot be opened.
        ValueError: the file is damaged.
    """
    with path.open("rb") as file:
        if np.lib.format.read_magic(file) != (1, 0):
            raise ValueError(f"{path}: unknown version of the format")
        shape, _, dtype = np.lib.format.read_array_header_1_0(file)
        return map_file(path)[file.tell() :].view(dtype).reshape(shape)


def fingerprint(*inputs: object) -> str:
    """Return a hash of arrays by type and bytes, and of other values by their repr."""
    digest = hashlib.blake2b(digest_size=16)
    for item in inputs:
        if isinstance(item, np.ndarray):
            digest.update(f"{item.dtype.str}{item.shape};".encode())
            digest.update(np.ascontiguousarray(item).data)
        else:
            digest.update(f"{item!r};".encode())
    return digest.hexdigest()


def load_or_build(
    folder: Path | None, key: str, names: Sequence[str], build: Callable[[], Sequence[np.ndarray]]
) -> list[np.ndarray]:
    """Map the arrays `folder/KEY-NAME.npy`; build and write them first if one is missing or damaged.

    If the folder is None or cannot be written, the arrays are returned as built, in the second case with a warning.
    """
    if folder is None:
        return list(build())
    paths = [folder / f"{key}-{name}.npy" for name in names]
    try:
        return [map_array(path) for path in paths]
    except (OSError, ValueError, EOFError):
        arrays = list(build())
    try:
        folder.mkdir(parents=True, exist_ok=True)
        remove_leftovers(*paths)
        for path, value in zip(paths, arrays, strict=True):
            with atomic_write(path) as file:
                np.save(file, value)
    except OSError as error:
        log.warning("cannot write the cache %s (%s): the order of samples is kept in memory", folder, error)
    return arrays
