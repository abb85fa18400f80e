"""From the files of a Hugging Face model to the weights of a run, a layer of a parameter at a time."""

from __future__ import annotations

import logging

import jax
import numpy as np

from megajax.config.base import InputError
from megajax.config.model import ModelConfig
from megajax.interop.hf.matching import Matched, check_kinds, match
from megajax.interop.hf.moves import Move, Moves, unpadded
from megajax.interop.hf.source import Source
from megajax.interop.imported import ParamsWriter
from megajax.models.families import build_model
from megajax.models.parameters import named_leaves

log = logging.getLogger(__name__)


class Incoming:
    """A model about to be imported; what does not fit is found here, before a number is read."""

    def __init__(self, source: Source, moves: Moves, model: ModelConfig, seed: int, *, draw_heads: bool) -> None:
        """Match the files with the model; `seed` draws the heads that they lack, if `draw_heads` asks for it.

        Raises:
            InputError: they do not fit.
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
        """Read all tensors into the checkpoint that is being written.

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
        """Heads as a new model has them; nothing else of it is computed."""

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
