"""Files that appear under their name complete, or not at all, and files that are read through the page cache."""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
import re
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO
from uuid import uuid4

import numpy as np

from megajax.config.base import InputError

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

    What has the name is on the disk, be the power cut the next moment. Concurrent writers of the same path do not
    disturb each other: the last one to finish wins.
    """
    temporary = path
    try:
        while True:
            temporary = path.with_name(f".{path.name}.{uuid4().hex}")
            file = temporary.open("xb", 1 << 20)
            _lock(file)
            if temporary.exists():
                break
            file.close()  # taken for a leftover before it was locked
        with file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
        _sync_folder(path.parent)
    except BaseException:
        if temporary != path:
            temporary.unlink(missing_ok=True)
        raise


def remove_leftovers(*paths: Path) -> None:
    """Remove what killed writers of some paths in one folder left there; what is being written stays."""
    names = "|".join(re.escape(path.name) for path in paths)
    for entry in paths[0].parent.iterdir():
        if not re.fullmatch(rf"\.({names})\.[0-9a-f]{{32}}", entry.name):
            continue
        with suppress(OSError), entry.open("rb") as file:  # somebody else may have been quicker
            if _lock(file):
                entry.unlink()


def _lock(file: BinaryIO) -> bool:
    """Hold a file until it is closed; False if another process holds it, or the file system has no locks."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def _sync_folder(folder: Path) -> None:
    """Have the names in a folder on the disk, where the file system can do that."""
    with suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def write_text(path: Path, text: str) -> None:
    """Write a text file that a user asked for.

    Raises:
        InputError: it cannot be written.
    """
    try:
        with atomic_write(path) as file:
            file.write(text.encode())
    except OSError as error:
        raise InputError(f"cannot write {path}: {error.strerror}") from error
