"""What goes where when a model changes hands: one move for every layer (and expert) of every parameter.

All of it follows from a family's table and the shapes of the model, so whatever does not fit is told before anything is
read or written. A move holds a few tensors at a time: memory does not grow with the model.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

import jax
import numpy as np

from megajax.config.base import InputError
from megajax.config.model import ModelConfig
from megajax.interop.hf.family import Family
from megajax.interop.patterns import Table, dims, interleaved, join, joined_shape, split, theirs_shape
from megajax.models.families import build_model
from megajax.models.parameters import named_leaves


class Parameter(NamedTuple):
    """One of our parameters."""

    shape: tuple[int, ...]
    depth: int
    """How many of its leading dimensions count layers and experts."""

    @property
    def block(self) -> tuple[int, ...]:
        """Shape of one layer (of one expert) of it."""
        return self.shape[self.depth :]


@dataclass(frozen=True)
class Move:
    """Some of their tensors are one block of our parameter."""

    ours: str
    index: tuple[int, ...]
    theirs: tuple[str, ...]
    patterns: tuple[str, ...]


def unpadded(model: ModelConfig) -> ModelConfig:
    """The model as files hold it: no rows beyond the vocabulary."""
    return replace(model, vocab_multiple=1)


class Moves:
    """All moves of one model."""

    def __init__(self, family: Family, model: ModelConfig, *, interleaved_rope: bool = False) -> None:
        """Work out the moves.

        Raises:
            InputError: the model has parameters that the family lacks, or no rotary embedding to be interleaved.
        """
        table = family.table(model)
        if interleaved_rope:
            table, split_halves = interleaved(table), table
            if table == split_halves:
                raise InputError(f"{family.model_type} has no rotary embedding: leave out that it is interleaved")
        self.family, self.sizes = family, dims(model)
        self.parameters: dict[str, Parameter] = {}
        self.moves: list[Move] = []
        abstract = jax.eval_shape(lambda: build_model(jax.random.key(0), unpadded(model)))
        for name, leaf in named_leaves(abstract):
            if name not in table:
                raise InputError(f"{family.model_type} has no counterpart of {name}, which this model has")
            self._add(name, leaf.shape, table)
        self.known = frozenset(name for move in self.moves for name in move.theirs)

    def _add(self, name: str, shape: tuple[int, ...], table: Table) -> None:
        names, patterns = tuple(table[name]), tuple(table[name].values())
        parameter = Parameter(shape, ("{layer}" in names[0]) + ("{expert}" in names[0]))
        if parameter.block != joined_shape(patterns, self.sizes):
            raise InputError(f"no {self.family.model_type} has the {name} of this model, whose shape is {shape}")
        self.parameters[name] = parameter
        for index in np.ndindex(shape[: parameter.depth]):
            numbers = dict(zip(("layer", "expert"), index, strict=False))
            self.moves.append(Move(name, index, tuple(their.format(**numbers) for their in names), patterns))

    def tensors(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Every tensor of the family, with its shape."""
        for move in self.moves:
            for name, pattern in zip(move.theirs, move.patterns, strict=True):
                yield name, theirs_shape(pattern, self.sizes)

    def join(self, move: Move, parts: list[np.ndarray]) -> np.ndarray:
        """Their tensors -> block."""
        return join(parts, move.patterns, self.sizes)

    def split(self, move: Move, block: np.ndarray) -> list[np.ndarray]:
        """Block -> their tensors."""
        return split(block, move.patterns, self.sizes)
