"""Where Hugging Face keeps a model: config.json beside safetensors files, one or several with an index."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from safetensors import SafetensorError, safe_open

from megajax.config.base import InputError

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
AGAIN = "download or save the model again"


class Precision(NamedTuple):
    """Kinds of numbers that fp32 holds exactly."""

    name: str
    """What safetensors call it."""
    word: str
    """What config.json calls it."""
    dtype: np.dtype


PRECISIONS = {
    "fp32": Precision("F32", "float32", np.dtype(np.float32)),
    "bf16": Precision("BF16", "bfloat16", jnp.dtype(jnp.bfloat16)),
    "fp16": Precision("F16", "float16", np.dtype(np.float16)),
}
"""By our names."""
DTYPES = {precision.name: precision.dtype for precision in PRECISIONS.values()}


@dataclass(frozen=True)
class Tensor:
    """What a header says of a tensor."""

    dtype: str
    shape: tuple[int, ...]
    file: str


class Source:
    """The tensors of a model; none is read before it is asked for."""

    def __init__(self, directory: Path, settings: dict[str, Any], files: dict[str, Any]) -> None:
        """`files` are open safetensors by name; see `open_source`.

        Raises:
            InputError: two of them hold the same tensor.
        """
        self.directory, self.settings = directory, settings
        self._files = files
        self.metadata = {name: file.metadata() or {} for name, file in files.items()}
        self.tensors: dict[str, Tensor] = {}
        for name, file in files.items():
            for key in file.keys():  # noqa: SIM118 - no mapping
                if key in self.tensors:
                    raise InputError(
                        f"{directory}: {self.tensors[key].file} and {name} both hold {key}: download the model again"
                    )
                about = file.get_slice(key)
                self.tensors[key] = Tensor(about.get_dtype(), tuple(about.get_shape()), name)

    def read(self, name: str) -> np.ndarray:
        """One tensor in its own dtype."""
        return self._files[self.tensors[name].file].get_tensor(name)


@contextmanager
def open_source(path: Path) -> Iterator[Source]:
    """Open a directory, or a .safetensors file with config.json beside it.

    Raises:
        InputError: there is no such model, or its files are damaged, or contradict one another.
    """
    if not path.exists():
        raise InputError(f"{path} does not exist: give the directory of a Hugging Face model")
    directory = path if path.is_dir() else path.parent
    settings = read_json(directory / "config.json")
    with ExitStack() as stack:

        def opened(names: Iterable[str]) -> Source:
            return Source(directory, settings, {name: stack.enter_context(_opened(directory / name)) for name in names})

        index, single = path / INDEX, path / SINGLE
        if path.is_file():
            yield opened([path.name])
        elif index.is_file():
            places = _read_index(index)
            source = opened(sorted(set(places.values())))
            for name, file in places.items():
                if name not in source.tensors or source.tensors[name].file != file:
                    raise InputError(f"{path}: {INDEX} says that {file} holds {name}, which it does not: {AGAIN}")
            if single.is_file() and SINGLE not in places.values():
                _require_same(source, opened([SINGLE]))
            yield source
        elif single.is_file():
            yield opened([SINGLE])
        else:
            remedy = "save it with transformers' save_pretrained"
            raise InputError(f"{path} holds no {SINGLE} and no {INDEX}: {remedy}")


def _opened(file: Path) -> AbstractContextManager[Any]:
    if not file.is_file():
        raise InputError(f"{file}: no such file: download the model completely")
    try:
        return safe_open(file, "numpy")
    except SafetensorError as error:
        raise InputError(f"{file} is damaged ({error}): download it again") from None


def _read_index(path: Path) -> dict[str, str]:
    """The file of every tensor."""
    places = read_json(path).get("weight_map")
    if not isinstance(places, dict) or not places:
        raise InputError(f"{path} has no weight_map: {AGAIN}")
    for name, file in places.items():
        if not isinstance(file, str) or Path(file).name != file:
            raise InputError(f"{path}: {file!s:.60} is no name of a file for {name}: {AGAIN}")
        if not (path.parent / file).is_file():
            raise InputError(f"{path} names {file}, and there is no such file: download the model completely")
    return places


def _require_same(indexed: Source, single: Source) -> None:
    """Refuse a model that is there twice unless both are the same.

    Raises:
        InputError: they differ.
    """
    for name in sorted(indexed.tensors.keys() | single.tensors.keys()):
        one, other = indexed.tensors.get(name), single.tensors.get(name)
        same = one is not None and other is not None and (one.dtype, one.shape) == (other.dtype, other.shape)
        if not same or indexed.read(name).tobytes() != single.read(name).tobytes():
            raise InputError(
                f"{indexed.directory} holds two models, {SINGLE} and the files of {INDEX}, which differ in {name}: "
                "delete the one that is not meant"
            )


def read_json(path: Path) -> dict[str, Any]:
    """An object from a JSON file.

    Raises:
        InputError: there is none.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(f"{path}: {error.strerror}: give the directory of a Hugging Face model") from None
    except (ValueError, RecursionError) as error:
        raise InputError(f"{path} is not JSON ({error})") from None
    if not isinstance(content, dict):
        raise InputError(f"{path} is not a JSON object")
    return content
