"""Match of the tensors in a model's files with our parameters, a layer (and an expert) at a time.

All of it follows from a family's table and the shapes of the model, so whatever does not fit is told before anything is
read or written. Files differ from the table in prefixes, in heads that they lack and in tensors that they hold twice;
`match` finds what is meant.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

import jax
import numpy as np

from megajax.config.base import InputError
from megajax.config.model import ModelConfig
from megajax.interop.hf.family import Family
from megajax.interop.hf.files import DTYPES, Tensor
from megajax.interop.patterns import Table, dims, interleaved, join, joined_shape, split, theirs_shape
from megajax.models.families import build_model
from megajax.models.parameters import named_leaves

BUFFERS = re.compile(r"(^|\.)h\.\d+\.attn\.(masked_)?bias$|\.rotary_emb\.inv_freq$|(^|\.)position_ids$")
"""Constants that old files hold beside the weights."""


class Parameter(NamedTuple):
    """One of our parameters."""

    shape: tuple[int, ...]
    depth: int
    """Number of leading dimensions, which count layers and experts."""

    @property
    def block(self) -> tuple[int, ...]:
        """Return the shape of one layer (of one expert) of the parameter."""
        return self.shape[self.depth :]


@dataclass(frozen=True)
class Move:
    """Tie one block of our parameter to the tensors of which it is made."""

    ours: str
    index: tuple[int, ...]
    theirs: tuple[str, ...]
    patterns: tuple[str, ...]


def unpadded(model: ModelConfig) -> ModelConfig:
    """Return the model as files hold it, without rows beyond the vocabulary."""
    return replace(model, vocab_multiple=1)


class Moves:
    """List all moves of one model, between its tensors and our parameters."""

    def __init__(self, family: Family, model: ModelConfig, *, interleaved_rope: bool = False) -> None:
        """Work out the moves of a model of a family, whose rotary embedding may turn neighbours in the files.

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
        """Iterate over the names of the family's tensors, with their shapes."""
        for move in self.moves:
            for name, pattern in zip(move.theirs, move.patterns, strict=True):
                yield name, theirs_shape(pattern, self.sizes)

    def join(self, move: Move, parts: list[np.ndarray]) -> np.ndarray:
        """Make our block of the tensors of a move."""
        return join(parts, move.patterns, self.sizes)

    def split(self, move: Move, block: np.ndarray) -> list[np.ndarray]:
        """Make the tensors of a move of our block."""
        return split(block, move.patterns, self.sizes)


class Matched(NamedTuple):
    """List the tensors that some files hold of a model."""

    names: dict[str, str]
    """Name that the family has for a tensor -> its name in the files."""
    twins: dict[str, str]
    """Name of a tensor that the files hold a second time -> the family's name of the one that counts."""
    absent: frozenset[str]
    """Names of our parameters that the files lack."""


def check_count(tensors: Collection[str], model: ModelConfig, where: object) -> None:
    """Refuse a model that has more layers (and experts) than there are tensors, before it is laid out one by one.

    Raises:
        InputError: there are more layers than tensors.
    """
    wanted = model.num_layers * max(1, model.experts) + (model.encoder_layers or 0)
    if wanted > len(tensors):
        raise InputError(
            f"{where} holds {len(tensors)} tensors, too few for the {model.num_layers} layers of config.json: "
            "one of them is wrong"
        )


def match(tensors: Collection[str], moves: Moves, where: object) -> Matched:
    """Find every tensor of the family among those of some files, which are called `where` in messages.

    Raises:
        InputError: a tensor is missing that a model has to have, or one is there that it has not.
    """
    names: dict[str, str] = {}
    missing: dict[str, str] = {}
    for move in moves.moves:
        for name in move.theirs:
            if found := _find(name, tensors, moves):
                names[name] = found
            else:
                missing[move.ours] = name
    for ours, name in missing.items():
        some = any(their in names for move in moves.moves if move.ours == ours for their in move.theirs)
        if some or ours not in moves.family.heads:
            raise InputError(
                f"{where} lacks the tensor {name}, which config.json asks for: "
                "download or save the model completely, or correct config.json"
            )
    twins = {}
    for name in sorted(set(tensors) - set(names.values())):
        if base := _twins(moves).get(name):
            twins[name] = base
        elif not BUFFERS.search(name):
            raise InputError(
                f"{where} holds the tensor {name}, which a {moves.family.model_type} as config.json has it does not: "
                "correct config.json, or save the model without it"
            )
    return Matched(names, twins, frozenset(missing))


def check_kinds(tensors: Mapping[str, Tensor], matched: Matched, moves: Moves, where: object) -> None:
    """Refuse tensors of another shape than config.json says, or of numbers that fp32 does not hold.

    Raises:
        InputError: there is such a tensor; the message names the first.
    """
    for name, shape in moves.tensors():
        if name not in matched.names:
            continue
        tensor = tensors[matched.names[name]]
        if tensor.shape != shape:
            raise InputError(
                f"{where}: {name} in {tensor.file} is {tensor.shape}, config.json says {shape}: one of them is wrong"
            )
        if tensor.dtype not in DTYPES:
            raise InputError(f"{where}: {name} is {tensor.dtype}: save the model as one of {', '.join(DTYPES)}")


def _find(name: str, tensors: Collection[str], moves: Moves) -> str | None:
    spellings = (name, name.removeprefix(moves.family.prefix))
    others = (twin for twin, base in _twins(moves).items() if base == name)
    return next((spelling for spelling in (*spellings, *others) if spelling in tensors), None)


def _twins(moves: Moves) -> dict[str, str]:
    """Return the twins of the family, without tensors that count in this model."""
    return {twin: base for twin, base in moves.family.twins.items() if twin not in moves.known}
