"""Arrays that are slow to compute, kept on disk by the hash of everything they are computed from.

A key names the contents, so a cache can be stale for no one: other data, seed or length is another key. Files appear by
rename only, so any number of processes may build the same key at once; all of them write the same bytes.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from megajax.data.files import atomic_write, map_array, remove_leftovers

log = logging.getLogger(__name__)


def fingerprint(*inputs: object) -> str:
    """Hash arrays by their type and bytes and everything else by its repr."""
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
    """Map the arrays `folder/KEY-NAME.npy`, after building and writing them if one is missing or damaged.

    Where the folder cannot be written, or is None, the arrays are returned as built, with a warning in the first case.
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
