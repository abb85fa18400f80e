"""Writing safetensors files piece by piece, in any order: the library wants all tensors of a file in memory at once.

A file of this format is

    8 bytes      length of the header, little-endian
    header       JSON: dtype, shape and place of every tensor behind it
    data         the tensors, row by row, wider dtypes first
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from megajax.interop.hf.source import DTYPES, INDEX, SINGLE, Tensor

SHARD_BYTES = 5 << 30
"""Size of the files of a model that had none before."""


def numbers(tensor: Tensor) -> int:
    """How many it holds."""
    return math.prod(tensor.shape)


def nbytes(tensor: Tensor) -> int:
    """Bytes of its data."""
    return numbers(tensor) * DTYPES[tensor.dtype].itemsize


class Target:
    """The files of a model, made as long as they will be; tensors are put into their places."""

    def __init__(
        self, directory: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, Mapping[str, str]]
    ) -> None:
        """Lay out the files, and write the index where there are several; `metadata` is by file."""
        self._places: dict[str, tuple[Path, int]] = {}
        self._tensors = tensors
        names = sorted({tensor.file for tensor in tensors.values()})
        for name in names:
            own = {key: tensor for key, tensor in tensors.items() if tensor.file == name}
            self._lay_out(directory / name, own, metadata.get(name) or {"format": "pt"})
        if names != [SINGLE]:
            count, size = (sum(map(measure, tensors.values())) for measure in (numbers, nbytes))
            index = {
                "metadata": {"total_parameters": count, "total_size": size},
                "weight_map": {key: tensors[key].file for key in sorted(tensors)},
            }
            (directory / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")

    def _lay_out(self, path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> None:
        header: dict[str, object] = {"__metadata__": dict(metadata)}
        end = 0
        starts = {}
        order = list(DTYPES)  # the library's: the same tensors make the same file
        for name in sorted(tensors, key=lambda name: (order.index(tensors[name].dtype), name)):
            starts[name], end = end, end + nbytes(tensors[name])
            header[name] = {
                "dtype": tensors[name].dtype,
                "shape": tensors[name].shape,
                "data_offsets": [starts[name], end],
            }
        text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
        text += b" " * (-len(text) % 8)
        with path.open("wb") as file:
            file.write(len(text).to_bytes(8, "little") + text)
            file.truncate(8 + len(text) + end)
        self._places |= {name: (path, 8 + len(text) + start) for name, start in starts.items()}

    def put(self, name: str, values: np.ndarray) -> None:
        """Write a tensor, rounded to its dtype."""
        tensor, (path, start) = self._tensors[name], self._places[name]
        assert values.shape == tensor.shape, name
        with path.open("r+b") as file:
            file.seek(start)
            file.write(np.ascontiguousarray(values, DTYPES[tensor.dtype]).reshape(-1).view(np.uint8).data)


def in_shards(tensors: Mapping[str, Tensor], limit: int = SHARD_BYTES) -> dict[str, str]:
    """A file for every tensor, such that each holds at most `limit` bytes (a tensor that is larger has its own)."""
    shards: list[list[str]] = [[]]
    size = 0
    for name, tensor in tensors.items():
        if shards[-1] and size + nbytes(tensor) > limit:
            shards.append([])
            size = 0
        shards[-1].append(name)
        size += nbytes(tensor)
    count = len(shards)
    return {name: _file_name(number, count) for number, names in enumerate(shards, 1) for name in names}


def _file_name(number: int, count: int) -> str:
    return SINGLE if count == 1 else f"model-{number:05d}-of-{count:05d}.safetensors"
