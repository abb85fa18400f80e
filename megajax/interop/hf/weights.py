"""Copying of weights between the files of a Hugging Face model and a checkpoint, a layer of a parameter at a time.

No more than the tensors of one layer are in memory, so that memory does not grow with the model.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax
import numpy as np
from etils import epath

from megajax.checkpoint.arrays import open_arrays
from megajax.checkpoint.errors import reason
from megajax.checkpoint.fingerprint import Tally
from megajax.config.base import InputError
from megajax.config.model import ModelConfig
from megajax.interop.hf.files import Manifest, Source, Target, Tensor
from megajax.interop.hf.tensors import Matched, Move, Moves, check_kinds, match, unpadded
from megajax.interop.imported import PART, ParamsWriter
from megajax.models.families import build_model
from megajax.models.parameters import named_leaves

log = logging.getLogger(__name__)


class Incoming:
    """Import the weights of files; what does not fit is found before a number is read."""

    def __init__(self, source: Source, moves: Moves, model: ModelConfig, seed: int, *, draw_heads: bool) -> None:
        """Match the files with the model; `draw_heads` allows heads that they lack to be drawn from the seed.

        Raises:
            InputError: the files do not fit the model.
        """
        self._source, self._moves, self._model, self._seed = source, moves, model, seed
        self._matched: Matched = match(source.tensors, moves, source.directory)
        check_kinds(source.tensors, self._matched, moves, source.directory)
        if self._matched.absent and not draw_heads:
            absent = [name for move in moves.moves if move.ours in self._matched.absent for name in move.theirs]
            tied = " (tie_word_embeddings is false)" if "head" in self._matched.absent else ""
            raise InputError(
                f"{source.directory} lacks {', '.join(absent)}, which config.json asks for{tied}: complete the files, "
                "or draw them at random (python -m megajax.convert import --draw-heads)"
            )

    def write(self, writer: ParamsWriter) -> None:
        """Copy all tensors into the checkpoint that is being written.

        Raises:
            InputError: two tensors that are one in this model differ.
        """
        self._check_twins()
        for name, parameter in self._moves.parameters.items():
            writer.create(name, parameter.shape, parameter.depth)
        for move in self._moves.moves:
            if move.ours not in self._matched.absent:
                writer.put(move.ours, move.index, self._block(move))
        if self._matched.absent:
            absent = sorted(self._matched.absent)
            log.warning("%s lacks %s: drawn anew", self._source.directory, ", ".join(absent))
            for name, values in self._drawn().items():
                writer.put(name, (), values)

    def _block(self, move: Move) -> np.ndarray:
        parts = [self._source.read(self._matched.names[name]) for name in move.theirs]
        return self._moves.join(move, [part.astype(np.float32, copy=False) for part in parts])

    def _drawn(self) -> dict[str, np.ndarray]:
        """Draw the missing heads as a new model has them, without computing anything else of that model."""

        def heads(key: jax.Array) -> dict[str, jax.Array]:
            model = build_model(key, unpadded(self._model))
            return {name: leaf[...] for name, leaf in named_leaves(model) if name in self._matched.absent}

        return jax.device_get(jax.jit(heads)(jax.random.key(self._seed)))

    def _check_twins(self) -> None:
        for twin, base in self._matched.twins.items():
            name = self._matched.names[base]
            if self._source.read(twin).tobytes() != self._source.read(name).tobytes():
                raise InputError(
                    f"{self._source.directory}: {twin} differs from {name}, which config.json says it is tied to: "
                    "correct tie_word_embeddings there"
                )


class Outgoing:
    """Export the weights of a checkpoint."""

    def __init__(self, checkpoint: epath.Path, record: Mapping[str, Any], moves: Moves) -> None:
        """Open the arrays of a checkpoint, given as the directory of one step and its record.

        Raises:
            InputError: the arrays are damaged, or not those of the model.
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
            directory: folder into which the files are written.
            manifest: names, dtypes and files of the tensors.
            dtype: dtype of all tensors, as safetensors calls it; None for those of the manifest.

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
        """Name the checkpoint in the error of a file that cannot be read."""
        try:
            yield
        except (OSError, ValueError, LookupError) as error:
            raise InputError(f"{self._where} is damaged ({reason(error)}): choose another checkpoint") from error
