"""Paths in `config.yaml` of a run, which stay right wherever the run lies by now.

A path that a user gives is relative to the working directory. A run writes it down such that it is found from any other
directory: as an absolute path, or relative to the run for what lies in the run itself, so that the run can be moved and
renamed. A run always has its own copy of its tokenizer's files, under the names that they had elsewhere:
`tokenizer_places` returns where it lies.
"""

from __future__ import annotations

import os.path
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from megajax.config.keys import PATH_KEYS
from megajax.config.presets import find_bundled

CONFIG = "config.yaml"
IDENTITY = "run.json"
"""File beside config.yaml that identifies a run even when it is moved or copied."""
TOKENIZER = "tokenizer"
"""Folder in a run that holds its tokenizer files."""
CAME_WITH_MODEL = "huggingface"
"""Folder in a run that holds what came with the Hugging Face model that it was made of, the tokenizer included."""
TRAINED_TOKENIZER = {"sentencepiece": ("model", "tokenizer.model"), "bert_wordpiece": ("vocab", "vocab.txt")}
"""Type of tokenizer that can be trained -> the key of its file, and the name of the file in the run."""
TOKENIZER_FILES = ("model", "vocab", "merges", "chat_template")
"""Keys of the section `tokenizer` that name a file."""


def for_the_run(run: Path, values: Mapping[str, Any]) -> dict[str, Any]:
    """Turn values by key that are right in the working directory into those that config.yaml of `run` keeps."""
    base = os.path.realpath(run)

    def name(path: str) -> str:
        if "://" in path:
            return path
        real = os.path.realpath(path)
        if real.startswith(base + os.sep):
            return os.path.relpath(real, base)
        return str(Path(find_bundled(path)).absolute())

    return {**values, **_map_paths(values, name)}


def from_the_run(run: Path, values: Mapping[str, Any]) -> dict[str, Any]:
    """Turn values by key in config.yaml of `run` into those that are right in the working directory."""
    new = (run / IDENTITY).is_file()

    def path(name: str) -> str:
        own = not Path(name).is_absolute() and "://" not in name and (new or (run / name).exists())
        return str(run / name) if own else name

    found = {**values, **_map_paths(values, path), "output_dir": str(run)}
    return found | _tokenizer_files(run, values, path)


def tokenizer_places(run: Path, name: str) -> tuple[Path, Path, Path]:
    """Return the places where a run's copy of a tokenizer file may lie; the first one where it is counts.

    A run copies its tokenizer, or trains it, into RUN/tokenizer. The second place is the name that config.yaml has for
    it, which for a tokenizer that an older version trained lies in RUN. What came with a model stays in
    RUN/huggingface.
    """
    return run / TOKENIZER / Path(name).name, run / name, run / CAME_WITH_MODEL / Path(name).name


def _tokenizer_files(run: Path, values: Mapping[str, Any], path: Callable[[str], str]) -> dict[str, str]:
    """Return by key where the tokenizer's files are, or where they should be if they are nowhere."""
    files = {}
    trained, default = TRAINED_TOKENIZER.get(values.get("tokenizer.type", ""), ("", ""))
    for field in TOKENIZER_FILES:
        key = f"tokenizer.{field}"
        name = values.get(key) or (default if field == trained else None)
        if name is None:
            continue
        places = tokenizer_places(run, name)
        elsewhere = str(places[0]) if name == default else path(name)
        files[key] = next((str(place) for place in places if place.is_file()), elsewhere)
    return files


def same_paths(one: Any, other: Any) -> bool:
    """Tell whether two values of a key name the same places, however they are spelled."""
    return _real(one) == _real(other)


def _real(value: Any) -> Any:
    if isinstance(value, str):
        return value if "://" in value else os.path.realpath(value)
    return tuple(map(_real, value)) if isinstance(value, list | tuple) else value


def _map_paths(values: Mapping[str, Any], change: Callable[[str], str]) -> dict[str, Any]:
    changed: dict[str, Any] = {}
    for key in PATH_KEYS:
        value = values.get(key)
        if isinstance(value, str):
            changed[key] = change(value)
        elif value:
            weighted = key.endswith("path") and len(value) > 1
            changed[key] = tuple(item if weighted and as_number(item) is not None else change(item) for item in value)
    return changed


def as_number(word: str) -> float | None:
    """Read a word of a data path as the weight that it is, or return None where it is a file."""
    try:
        return float(word)
    except ValueError:
        return None
