"""A checkpoint of Megatron-LM: found, opened, and its tensors one by one as ours."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple, Protocol

import jax
import numpy as np

from megajax.config.base import InputError
from megajax.config.model import ModelConfig
from megajax.interop.megatron.arguments import Architecture
from megajax.interop.megatron.distributed import DistributedFiles
from megajax.interop.megatron.names import LAYER, WHOLE
from megajax.interop.megatron.ranks import FOLDER, RankFiles
from megajax.models.families import build_model
from megajax.models.parameters import named_leaves

TRACKER = "latest_checkpointed_iteration.txt"


class Files(Protocol):
    """What both layouts offer; names are those of Megatron core, of a layer without its number."""

    args: Namespace
    whole_names: set[str]
    layer_names: set[str]

    def whole(self, name: str) -> np.ndarray:
        """A tensor of the model, fp32."""
        ...

    def layer(self, number: int, name: str) -> np.ndarray:
        """A tensor of a layer, fp32."""
        ...


class Piece(NamedTuple):
    """A block of one of our parameters."""

    name: str
    place: tuple[int, ...]
    """Its layer, or nothing."""
    value: np.ndarray


def is_megatron(path: Path) -> bool:
    """Whether a directory looks like a checkpoint of Megatron-LM, or like a folder of them."""
    return path.is_dir() and (
        (path / TRACKER).is_file()
        or (path / "common.pt").is_file()
        or any(FOLDER.search(entry.name) for entry in path.iterdir())
    )


def open_checkpoint(path: Path) -> Files:
    """Open the iteration that a folder's tracker names, or the one that `path` is.

    Raises:
        InputError: there is none, or it cannot be read.
    """
    if (path / TRACKER).is_file():
        word = (path / TRACKER).read_text(errors="replace").strip()
        if word != "release" and not word.isdecimal():
            raise InputError(f"{path / TRACKER} holds {word[:20]!r}, not the number of an iteration")
        path = path / (word if word == "release" else f"iter_{int(word):07d}")
    if (path / "common.pt").is_file():
        return DistributedFiles(path)
    if path.is_dir() and any(FOLDER.search(entry.name) for entry in path.iterdir()):
        return RankFiles(path)
    raise InputError(f"{path} holds neither mp_rank_* folders nor common.pt: it is no checkpoint of Megatron-LM")


def is_bert(files: Files) -> bool:
    """Whether a model restores masked tokens; nothing in its arguments says so."""
    return any(name.startswith("lm_head.") for name in files.whole_names)


def shapes(model: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Our parameters of a model."""
    abstract = jax.eval_shape(lambda: build_model(jax.random.key(0), model))
    return {name: leaf.shape for name, leaf in named_leaves(abstract)}


def pieces(files: Files, architecture: Architecture) -> Iterator[Piece]:
    """Every block of every parameter.

    Args:
        files: opened.
        architecture: what they hold; of a model without rows beyond the vocabulary.

    Raises:
        InputError: a tensor has no counterpart, is missing, or has another shape.
    """
    model = architecture.model
    wanted = shapes(model)
    whole = {WHOLE[name][0]: name for name in _known(files.whole_names, WHOLE)}
    layer = {f"blocks.{LAYER[name][0]}": name for name in _known(files.layer_names, LAYER)}
    if model.tied_head:
        whole.pop("head", None)  # a copy that old versions saved
    for name in wanted.keys() - whole.keys() - layer.keys():
        raise InputError(f"the checkpoint lacks {name}, which the model of its args has")
    for name in (whole.keys() | layer.keys()) - wanted.keys():
        raise InputError(f"the checkpoint holds {name}, which the model of its args lacks")
    for name, theirs in whole.items():
        yield _checked(Piece(name, (), WHOLE[theirs][1](files.whole(theirs), architecture)), wanted[name])
    for name, theirs in layer.items():
        for number in range(model.num_layers):
            value = LAYER[theirs][1](files.layer(number, theirs), architecture)
            yield _checked(Piece(name, (number,), value), wanted[name][1:])


def _known(names: set[str], table: Mapping[str, object]) -> set[str]:
    for name in sorted(names - table.keys()):
        raise InputError(
            f"the checkpoint holds {name}, which has no counterpart here: of T5 and others nothing can be imported"
        )
    return names


def _checked(piece: Piece, shape: tuple[int, ...]) -> Piece:
    if piece.value.shape != shape:
        raise InputError(f"the checkpoint's {piece.name} has shape {piece.value.shape}, the model of its args {shape}")
    return piece
