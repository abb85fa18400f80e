"""Files that appear under their name complete, or not at all, and files that are read through the page cache."""

from __future__ import annotations

import ctypes
import mmap
import os
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO
from uuid import uuid4

import numpy as np

from megajax.config.base import ConfigError

_LIBC = ctypes.CDLL(None, use_errno=True)
_LIBC.mmap.restype = ctypes.c_void_p
_LIBC.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
_LIBC.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_FAILED = ctypes.c_void_p(-1).value


def map_file(path: Path) -> np.ndarray:
    """The bytes of a file, uint8, read-only and through the page cache.

    No descriptor stays open, as Python's own mmap (and with it `numpy.memmap`) keeps one per file before version 3.13:
    a mix of some hundred sources, with two token files and three cached arrays each, would run out of them.

    Raises:
        OSError: it cannot be opened or mapped.
    """
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        if not size:  # cannot be mapped
            return np.empty(0, np.uint8)
        address = _LIBC.mmap(None, size, mmap.PROT_READ, mmap.MAP_SHARED, file.fileno(), 0)
    if address == _FAILED:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), str(path))
    memory = (ctypes.c_ubyte * size).from_address(address)
    weakref.finalize(memory, _LIBC.munmap, address, size).atexit = False  # threads may read until the very end
    return np.frombuffer(memoryview(memory).toreadonly(), np.uint8)


def map_array(path: Path) -> np.ndarray:
    """The array in a .npy file that `numpy.save` wrote, mapped.

    Raises:
        OSError: it cannot be opened.
        ValueError: it is damaged.
    """
    with path.open("rb") as file:
        if np.lib.format.read_magic(file) != (1, 0):
            raise ValueError(f"{path}: unknown version of the format")
        shape, _, dtype = np.lib.format.read_array_header_1_0(file)
        return map_file(path)[file.tell() :].view(dtype).reshape(shape)


@contextmanager
def atomic_write(path: Path) -> Iterator[BinaryIO]:
    """Open `path` for writing under a temporary name beside it, and rename when the block ends without an error.

    Concurrent writers of the same path do not disturb each other: the last one to finish wins.
    """
    temporary = path.with_name(f".{path.name}.{uuid4().hex}")
    try:
        with temporary.open("xb", 1 << 20) as file:
            yield file
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def write_text(path: Path, text: str) -> None:
    """Write a text file that a user asked for.

    Raises:
        ConfigError: it cannot be written.
    """
    try:
        with atomic_write(path) as file:
            file.write(text.encode())
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}") from error
