"""Which of a file's tensors is which of the family's: files differ in prefixes, heads and what they hold twice."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import NamedTuple

from megajax.config.base import InputError
from megajax.config.model import ModelConfig
from megajax.interop.hf.moves import Moves
from megajax.interop.hf.source import DTYPES, Tensor

BUFFERS = re.compile(r"(^|\.)h\.\d+\.attn\.(masked_)?bias$|\.rotary_emb\.inv_freq$|(^|\.)position_ids$")
"""Constants that old files hold beside the weights."""


class Matched(NamedTuple):
    """What a file holds of a model."""

    names: dict[str, str]
    """The family's name of a tensor -> the file's."""
    twins: dict[str, str]
    """A tensor of the file that is held twice -> the family's name of the one that counts."""
    absent: frozenset[str]
    """Our parameters that it lacks."""


def check_count(tensors: Collection[str], model: ModelConfig, where: object) -> None:
    """Refuse a model of more layers (and experts) than there are tensors, before it is laid out one by one.

    Raises:
        InputError: it is such a model.
    """
    wanted = model.num_layers * max(1, model.experts) + (model.encoder_layers or 0)
    if wanted > len(tensors):
        raise InputError(
            f"{where} holds {len(tensors)} tensors, too few for the {model.num_layers} layers of config.json: "
            "one of them is wrong"
        )


def match(tensors: Collection[str], moves: Moves, where: object) -> Matched:
    """Find every tensor of the family.

    Raises:
        InputError: one is missing that a model has to have, or the file, which is called `where`, holds another.
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
        InputError: names the first.
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
    """Those of the family, but for tensors that count in this model."""
    return {twin: base for twin, base in moves.family.twins.items() if twin not in moves.known}
