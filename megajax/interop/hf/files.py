"""Files in which Hugging Face keeps a model: config.json, and safetensors files, one or several with an index.

`open_source` reads them. `Target` writes them piece by piece, in any order: the library wants all tensors of a file in
memory at once. A `Manifest` describes them without their numbers. A file of this format is

    8 bytes      length of the header, little-endian
    header       JSON: dtype, shape and place of every tensor behind it
    data         the tensors, row by row, wider dtypes first
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple, Self

import jax.numpy as jnp
import numpy as np
from safetensors import SafetensorError, safe_open

from megajax.config.base import InputError

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
AGAIN = "download or save the model again"
CARRIED = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "chat_template.*",
    "vocab.*", "merges.txt", "*.model", "generation_config.json",
)  # fmt: skip
"""Names of the small files that go with a model, next to config.json."""
SHARD_BYTES = 5 << 30
"""Largest size in bytes of a file of a model that was in none before."""


class Precision(NamedTuple):
    """A kind of numbers that fp32 holds exactly."""

    name: str
    """Name of the kind in safetensors files."""
    word: str
    """Name of the kind in config.json."""
    dtype: np.dtype


PRECISIONS = {
    "fp32": Precision("F32", "float32", np.dtype(np.float32)),
    "bf16": Precision("BF16", "bfloat16", jnp.dtype(jnp.bfloat16)),
    "fp16": Precision("F16", "float16", np.dtype(np.float16)),
}
"""Our name of a precision -> its kind of numbers."""
DTYPES = {precision.name: precision.dtype for precision in PRECISIONS.values()}


@dataclass(frozen=True)
class Tensor:
    """A tensor as the header of its file does."""

    dtype: str
    shape: tuple[int, ...]
    file: str

    @property
    def size(self) -> int:
        """Return the number of its elements."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Return the number of bytes of its data."""
        return self.size * DTYPES[self.dtype].itemsize


class Source:
    """Read the tensors of a model, none before it is asked for."""

    def __init__(self, directory: Path, settings: dict[str, Any], files: dict[str, Any]) -> None:
        """Read the headers of open files, given by name; see `open_source`.

        Raises:
            InputError: two files hold the same tensor.
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
        """Read one tensor in its own dtype."""
        return self._files[self.tensors[name].file].get_tensor(name)


@contextmanager
def open_source(path: Path) -> Iterator[Source]:
    """Open a directory, or a .safetensors file with config.json beside it.

    Raises:
        InputError: there is no such model, or its files are damaged or contradict one another.
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
    """Read the file of every tensor from an index."""
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
    """Refuse a model that is in two places unless both are the same.

    Raises:
        InputError: a tensor differs; the message names it.
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
    """Read an object from a JSON file.

    Raises:
        InputError: the file cannot be read, or holds something else.
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


def carried(folder: Path) -> list[Path]:
    """List the small files that go with a model, next to config.json."""
    return sorted({path for pattern in CARRIED for path in folder.glob(pattern) if path.is_file()})


class Target:
    """Write the files of a model, which have their full length from the start, with tensors put into their places."""

    def __init__(
        self, directory: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, Mapping[str, str]]
    ) -> None:
        """Lay out the files, whose headers have this metadata by file, and write the index where there are several."""
        self._places: dict[str, tuple[Path, int]] = {}
        self._tensors = tensors
        names = sorted({tensor.file for tensor in tensors.values()})
        for name in names:
            own = {key: tensor for key, tensor in tensors.items() if tensor.file == name}
            self._lay_out(directory / name, own, metadata.get(name) or {"format": "pt"})
        if names != [SINGLE]:
            count = sum(tensor.size for tensor in tensors.values())
            size = sum(tensor.nbytes for tensor in tensors.values())
            index = {
                "metadata": {"total_parameters": count, "total_size": size},
                "weight_map": {key: tensors[key].file for key in sorted(tensors)},
            }
            (directory / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")

    def _lay_out(self, path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> None:
        header: dict[str, object] = {"__metadata__": dict(metadata)}
        end = 0
        starts = {}
        order = list(DTYPES)  # the library's: the same tensors make the same file
        for name in sorted(tensors, key=lambda name: (order.index(tensors[name].dtype), name)):
            starts[name], end = end, end + tensors[name].nbytes
            header[name] = {
                "dtype": tensors[name].dtype,
                "shape": tensors[name].shape,
                "data_offsets": [starts[name], end],
            }
        text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
        text += b" " * (-len(text) % 8)
        with path.open("wb") as file:
            file.write(len(text).to_bytes(8, "little") + text)
            file.truncate(8 + len(text) + end)
        self._places |= {name: (path, 8 + len(text) + start) for name, start in starts.items()}

    def put(self, name: str, values: np.ndarray) -> None:
        """Write a tensor, rounded to its dtype, into its place."""
        tensor, (path, start) = self._tensors[name], self._places[name]
        assert values.shape == tensor.shape, name
        with path.open("r+b") as file:
            file.seek(start)
            file.write(np.ascontiguousarray(values, DTYPES[tensor.dtype]).reshape(-1).view(np.uint8).data)


def in_shards(tensors: Mapping[str, Tensor], limit: int = SHARD_BYTES) -> dict[str, str]:
    """Name a file for every tensor, so that each file holds at most `limit` bytes, or one tensor that is larger."""
    shards: list[list[str]] = [[]]
    size = 0
    for name, tensor in tensors.items():
        if shards[-1] and size + tensor.nbytes > limit:
            shards.append([])
            size = 0
        shards[-1].append(name)
        size += tensor.nbytes
    count = len(shards)
    return {name: _file_name(number, count) for number, names in enumerate(shards, 1) for name in names}


def _file_name(number: int, count: int) -> str:
    return SINGLE if count == 1 else f"model-{number:05d}-of-{count:05d}.safetensors"


@dataclass(frozen=True)
class Manifest:
    """The files of a model without their numbers; `tensors.json` of a run makes exports look like imports."""

    dtypes: Mapping[str, str]
    """Name of a tensor -> its dtype, as safetensors calls it."""
    files: Mapping[str, str]
    """Name of a tensor -> the name of its file."""
    metadata: Mapping[str, Mapping[str, str]]
    """Name of a file -> the metadata in its header."""
    interleaved_rope: bool
    """Whether the rotary embedding of the weights turns neighbours."""

    @classmethod
    def of(cls, source: Source, *, interleaved_rope: bool) -> Self:
        """Describe the files that are being read."""
        dtypes = {name: tensor.dtype for name, tensor in source.tensors.items()}
        files = {name: tensor.file for name, tensor in source.tensors.items()}
        return cls(dtypes, files, source.metadata, interleaved_rope)

    @classmethod
    def new(cls, shapes: Mapping[str, tuple[int, ...]], dtype: str) -> Self:
        """Describe files of a handy size, for a model that was in none so far."""
        files = in_shards({name: Tensor(dtype, shape, "") for name, shape in shapes.items()})
        return cls(dict.fromkeys(shapes, dtype), files, {}, interleaved_rope=False)

    @classmethod
    def read(cls, path: Path) -> Self:
        """Read a manifest that `write` has written.

        Raises:
            InputError: the file cannot be read.
        """
        try:
            return cls(**read_json(path))
        except TypeError:
            raise InputError(f"{path} is not what an import wrote: import the model again") from None

    def completed(self, names: Collection[str], there: Mapping[str, str]) -> Self:
        """Add heads that the files lack.

        Args:
            names: names of all tensors, which become those of the files: they differ where a model has no head.
            there: name of a tensor -> its name in the files, for tensors that these have.
        """
        usual, _ = Counter(self.dtypes.values()).most_common(1)[0]
        last = max(self.files.values())
        dtypes = {name: self.dtypes[there[name]] if name in there else usual for name in names}
        files = {name: self.files[there[name]] if name in there else last for name in names}
        return replace(self, dtypes=dtypes, files=files)

    def write(self, path: Path) -> None:
        """Write the manifest as JSON."""
        path.write_text(json.dumps(vars(self), indent=1) + "\n", encoding="utf-8")
