"""From a checkpoint of a run to the files of a Hugging Face model, a layer of a parameter at a time."""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from etils import epath

from megajax.checkpoint.arrays import open_arrays
from megajax.checkpoint.errors import reason
from megajax.checkpoint.fingerprint import Tally
from megajax.config.base import InputError
from megajax.interop.hf.manifest import Manifest
from megajax.interop.hf.matching import match
from megajax.interop.hf.moves import Move, Moves
from megajax.interop.hf.source import Tensor
from megajax.interop.hf.target import Target
from megajax.interop.imported import PART

log = logging.getLogger(__name__)


class Outgoing:
    """A checkpoint about to be exported."""

    def __init__(self, checkpoint: epath.Path, record: Mapping[str, Any], moves: Moves) -> None:
        """Open the arrays of `checkpoint`, the directory of one step, whose record is `record`.

        Raises:
            InputError: they are damaged, or not those of the model.
        """
        self._moves, self._record, self._where = moves, record, checkpoint
        for name in moves.parameters:
            if f"{PART}.{name}" not in record["arrays"]:
                raise InputError(f"{checkpoint} lacks {name}: it was saved from another model or version")
        with self._reading():
            opened = open_arrays(checkpoint / "state", [f"{PART}.{name}" for name in moves.parameters])
        self._stored = dict(zip(moves.parameters, opened.values(), strict=True))
        for name, parameter in moves.parameters.items():
            there, wanted = self._stored[name].shape, parameter.shape
            # A vocabulary may have more rows, which pad it to the layout and stay behind.
            if there[1:] != wanted[1:] or there[0] < wanted[0]:
                raise InputError(f"{checkpoint}: {name} is {there} there and {wanted} in this model: it is of another")

    def write(self, directory: Path, manifest: Manifest, dtype: str | None) -> None:
        """Write the files that the manifest lists.

        Args:
            directory: where to.
            manifest: names, dtypes and files of the tensors.
            dtype: of all tensors instead, as safetensors calls it.

        Raises:
            InputError: an array is damaged, or the files lack what the model has.
        """
        matched = match(manifest.dtypes, self._moves, "tensors.json")
        if matched.absent:
            log.info("left out, as the original has none: %s", ", ".join(sorted(matched.absent)))
        spellings = defaultdict(list)
        for spelling, name in [*((file, ours) for ours, file in matched.names.items()), *matched.twins.items()]:
            spellings[name].append(spelling)
        tensors = {
            spelling: Tensor(dtype or manifest.dtypes[spelling], shape, manifest.files[spelling])
            for name, shape in self._moves.tensors()
            for spelling in spellings[name]
        }
        target = Target(directory, tensors, manifest.metadata)
        prints = {name: Tally() for name in self._moves.parameters.keys() - matched.absent}
        for move in self._moves.moves:
            if move.ours in prints:
                block = self._block(move, prints[move.ours])
                for name, values in zip(move.theirs, self._moves.split(move, block), strict=True):
                    for spelling in spellings[name]:
                        target.put(spelling, values)
        for name, found in prints.items():
            with self._reading():
                if str(found) != self._record["fingerprint"][f"{PART}.{name}"]:
                    raise ValueError(f"the contents of {name} are not what was saved")

    def _block(self, move: Move, fingerprint: Tally) -> np.ndarray:
        shape = self._moves.parameters[move.ours].block
        whole = (*((at, at + 1) for at in move.index), *((0, n) for n in shape))
        with self._reading():
            part = self._stored[move.ours].read(whole)
        fingerprint.add(part, tuple(start for start, _ in whole))
        return part.reshape(shape)

    @contextmanager
    def _reading(self) -> Iterator[None]:
        """Say of a file that cannot be read where it belongs."""
        try:
            yield
        except (OSError, ValueError, LookupError) as error:
            raise InputError(f"{self._where} is damaged ({reason(error)}): choose another checkpoint") from error
