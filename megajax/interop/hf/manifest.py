"""`tensors.json` of an imported run: what its model looked like as files, so that it can look the same again."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Self

from megajax.config.base import InputError
from megajax.interop.hf.matching import match
from megajax.interop.hf.moves import Moves
from megajax.interop.hf.source import Source, Tensor, read_json
from megajax.interop.hf.target import in_shards


@dataclass(frozen=True)
class Manifest:
    """The files of a model without their numbers."""

    dtypes: Mapping[str, str]
    """By tensor, as safetensors calls them."""
    files: Mapping[str, str]
    """File of every tensor."""
    metadata: Mapping[str, Mapping[str, str]]
    """What the header of a file says besides."""
    interleaved_rope: bool

    @classmethod
    def of(cls, source: Source, *, interleaved_rope: bool) -> Self:
        """That of the files that are being read."""
        dtypes = {name: tensor.dtype for name, tensor in source.tensors.items()}
        files = {name: tensor.file for name, tensor in source.tensors.items()}
        return cls(dtypes, files, source.metadata, interleaved_rope)

    @classmethod
    def new(cls, shapes: Mapping[str, tuple[int, ...]], dtype: str) -> Self:
        """That of a model which was never in files, told to some of a handy size."""
        files = in_shards({name: Tensor(dtype, shape, "") for name, shape in shapes.items()})
        return cls(dict.fromkeys(shapes, dtype), files, {}, interleaved_rope=False)

    @classmethod
    def read(cls, path: Path) -> Self:
        """What was written.

        Raises:
            InputError: it cannot be read.
        """
        try:
            return cls(**read_json(path))
        except TypeError:
            raise InputError(f"{path} is not what an import wrote: import the model again") from None

    def is_complete(self, moves: Moves) -> bool:
        """Whether the files have all that a model of theirs has."""
        return not match(self.dtypes, moves, "tensors.json").absent

    def completed(self, moves: Moves) -> Self:
        """The same with the heads that the files lack, under the names that they have beside all heads."""
        there = match(self.dtypes, moves, "tensors.json")
        usual, _ = Counter(self.dtypes.values()).most_common(1)[0]
        last = max(self.files.values())
        dtypes, files = {}, {}
        for name, _ in moves.tensors():
            spelling = there.names.get(name)
            dtypes[name] = self.dtypes[spelling] if spelling else usual
            files[name] = self.files[spelling] if spelling else last
        return replace(self, dtypes=dtypes, files=files)

    def write(self, path: Path) -> None:
        """Write it as JSON."""
        path.write_text(json.dumps(vars(self), indent=1) + "\n", encoding="utf-8")
