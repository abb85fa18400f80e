"""Where Hugging Face keeps a model: config.json beside safetensors files, one or several with an index."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from safetensors import SafetensorError, safe_open

from megajax.config.base import ConfigError

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"


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
        """`files` are open safetensors by name; see `open_source`."""
        self.directory, self.settings = directory, settings
        self._files = files
        self.metadata = {name: file.metadata() or {} for name, file in files.items()}
        self.tensors: dict[str, Tensor] = {}
        for name, file in files.items():
            for key in file.keys():  # noqa: SIM118 - no mapping
                about = file.get_slice(key)
                self.tensors[key] = Tensor(about.get_dtype(), tuple(about.get_shape()), name)

    def read(self, name: str) -> np.ndarray:
        """One tensor in its own dtype."""
        return self._files[self.tensors[name].file].get_tensor(name)


@contextmanager
def open_source(path: Path) -> Iterator[Source]:
    """Open a directory, or a .safetensors file with config.json beside it.

    Raises:
        ConfigError: there is no such model, or its files are damaged.
    """
    if not path.exists():
        raise ConfigError(f"{path} does not exist: give the directory of a Hugging Face model")
    directory = path if path.is_dir() else path.parent
    settings = read_json(directory / "config.json")
    with ExitStack() as stack:
        files = {}
        for name in _file_names(path):
            file = directory / name
            if not file.is_file():
                raise ConfigError(f"{file}: no such file: download the model completely")
            try:
                files[name] = stack.enter_context(safe_open(file, "numpy"))
            except SafetensorError as error:
                raise ConfigError(f"{file} is damaged ({error}): download it again") from None
        yield Source(directory, settings, files)


def _file_names(path: Path) -> list[str]:
    if path.is_file():
        return [path.name]
    if (path / INDEX).is_file():
        return sorted(set(read_json(path / INDEX)["weight_map"].values()))
    if (path / SINGLE).is_file():
        return [SINGLE]
    remedy = "save it with transformers' save_pretrained"
    raise ConfigError(f"{path} holds no {SINGLE} and no {INDEX}: {remedy}")


def read_json(path: Path) -> dict[str, Any]:
    """An object from a JSON file.

    Raises:
        ConfigError: there is none.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}: give the directory of a Hugging Face model") from None
    except ValueError as error:
        raise ConfigError(f"{path} is not JSON ({error})") from None
    if not isinstance(content, dict):
        raise ConfigError(f"{path} is not a JSON object")
    return content
