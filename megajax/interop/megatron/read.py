"""Opening of Megatron-LM's checkpoints, and reading of their tensors one by one as ours."""

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
from megajax.interop.megatron.names import LAYER, MIXTURE, WHOLE, Row, by_their_name
from megajax.interop.megatron.ranks import FOLDER, RankFiles
from megajax.models.families import build_model
from megajax.models.parameters import named_leaves

TRACKER = "latest_checkpointed_iteration.txt"


class Files(Protocol):
    """Read the weights of a checkpoint in either layout by their names in Megatron core, without layer numbers."""

    args: Namespace
    whole_names: set[str]
    layer_names: set[str]

    def whole(self, name: str) -> np.ndarray:
        """Read a tensor of the model as fp32."""
        ...

    def layer(self, number: int, name: str) -> np.ndarray:
        """Read a tensor of a layer as fp32."""
        ...


class Piece(NamedTuple):
    """A block of one of our parameters."""

    name: str
    place: tuple[int, ...]
    """Number of the layer, or nothing."""
    value: np.ndarray


def is_megatron(path: Path) -> bool:
    """Tell whether a directory looks like a checkpoint of Megatron-LM, or like a folder of them."""
    return path.is_dir() and (
        (path / TRACKER).is_file()
        or (path / "common.pt").is_file()
        or any(FOLDER.search(entry.name) for entry in path.iterdir())
    )


def open_checkpoint(path: Path) -> Files:
    """Open the iteration that a folder's tracker names, or the iteration that `path` is.

    Raises:
        InputError: there is no such iteration, or it cannot be read.
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
    """Tell by its tensors whether a model restores masked tokens; nothing in its arguments says so."""
    return any(name.startswith("lm_head.") for name in files.whole_names)


def shapes(model: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Return the shapes of our parameters of a model."""
    abstract = jax.eval_shape(lambda: build_model(jax.random.key(0), model))
    return {name: leaf.shape for name, leaf in named_leaves(abstract)}


def pieces(files: Files, architecture: Architecture) -> Iterator[Piece]:
    """Iterate over every block of every parameter.

    Args:
        files: open checkpoint.
        architecture: meaning of the weights, for a model without rows beyond the vocabulary.

    Raises:
        InputError: a tensor has no counterpart, is missing, or has another shape.
    """
    model, wanted = architecture.model, shapes(architecture.model)
    whole = _known(files.whole_names, by_their_name(WHOLE))
    layer = _known(files.layer_names, by_their_name(LAYER, MIXTURE))
    if model.tied_head:  # a copy that old versions saved
        whole = {name: row for name, row in whole.items() if row.ours != "head"}
    found = {row.ours for row in (*whole.values(), *layer.values())}
    for name in wanted.keys() - found:
        raise InputError(f"the checkpoint lacks {name}, which the model of its args has")
    for name in found - wanted.keys():
        raise InputError(f"the checkpoint holds {name}, which the model of its args lacks")
    for name, row in whole.items():
        yield Piece(row.ours, (), row.convert(files.whole(name), architecture))
    for name, row in layer.items():
        for number in range(model.num_layers):
            yield Piece(row.ours, (number,), row.convert(files.layer(number, name), architecture))


def _known(names: set[str], rows: Mapping[str, Row]) -> dict[str, Row]:
    for name in sorted(names - rows.keys()):
        raise InputError(
            f"the checkpoint holds {name}, which has no counterpart here: of T5 and others nothing can be imported"
        )
    return {name: rows[name] for name in names}
