"""Writing of checkpoints that hold weights alone, piece by piece in one process, for models from elsewhere.

`store.Checkpoints` reads these checkpoints: arrays in plain zarr files, one for every layer (and expert) of a
parameter, and a record with their fingerprints. No array is ever in memory as a whole.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from megajax.checkpoint.errors import one_line
from megajax.checkpoint.fingerprint import Tally
from megajax.checkpoint.record import FORMAT_VERSION, seal
from megajax.config.base import InputError

PART = "params"
"""Name of the part of a train state that is written."""


class ParamsWriter:
    """Write the checkpoint of one step: `create` every array, `put` all of its blocks, then `finish`."""

    def __init__(self, directory: Path, step: int = 0) -> None:
        """Begin the checkpoint of a step in the directory of a run's checkpoints."""
        self._path = directory / str(step)
        self._step = step
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._depths: dict[str, int] = {}
        self._prints: dict[str, Tally] = {}
        for folder in ("state", "record"):
            (self._path / folder).mkdir(parents=True)

    def create(self, name: str, shape: tuple[int, ...], depth: int) -> None:
        """Begin an fp32 array whose first `depth` dimensions count blocks that are put one by one."""
        self._shapes[name], self._depths[name], self._prints[name] = shape, depth, Tally()
        about = {
            "chunks": [*(1,) * depth, *shape[depth:]],
            "compressor": None,
            "dimension_separator": ".",
            "dtype": "<f4",
            "fill_value": None,
            "filters": None,
            "order": "C",
            "shape": list(shape),
            "zarr_format": 2,
        }
        folder = self._folder(name)
        folder.mkdir()
        (folder / ".zarray").write_text(json.dumps(about))

    def put(self, name: str, index: tuple[int, ...], block: np.ndarray) -> None:
        """Write the block at an index of the leading dimensions."""
        shape, depth = self._shapes[name], self._depths[name]
        assert len(index) == depth and block.shape == shape[depth:], name
        block = np.ascontiguousarray(block, "<f4")
        start = (*index, *(0,) * block.ndim)
        (self._folder(name) / ".".join(map(str, start))).write_bytes(block.reshape(-1).view(np.uint8).data)
        self._prints[name].add(block.reshape(*(1,) * depth, *block.shape), start)

    def finish(self, record: Mapping[str, Any]) -> None:
        """Write the record: what has to be known besides the arrays, as JSON."""
        document = {
            "version": FORMAT_VERSION,
            "step": self._step,
            **record,
            "arrays": {f"{PART}.{name}": ["float32", *shape] for name, shape in self._shapes.items()},
            "fingerprint": {f"{PART}.{name}": str(value) for name, value in self._prints.items()},
        }
        (self._path / "record" / "metadata").write_text(seal(document))

    def _folder(self, name: str) -> Path:
        return self._path / "state" / f"{PART}.{name}"


@contextmanager
def staged_directory(out: Path) -> Iterator[Path]:
    """Make a directory that becomes `out` if all goes well, and is removed otherwise.

    Raises:
        InputError: `out` exists, or there is no room.
    """
    if out.exists():
        raise InputError(f"{out} exists: choose another directory, or delete it")
    staged = out.with_name(f"{out.name}.unfinished")
    with one_line(f"writing {out}", "make room, or choose another directory"):
        shutil.rmtree(staged, ignore_errors=True)
        staged.mkdir(parents=True)
        try:
            yield staged
            staged.replace(out)
        finally:
            shutil.rmtree(staged, ignore_errors=True)
