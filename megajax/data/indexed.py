"""Megatron's token files: `PREFIX.bin` holds the tokens, `PREFIX.idx` says where each sequence lies.

Layout of the .idx, little-endian and unpadded (Megatron-LM IndexedDataset, version 1): a 34-byte header (magic,
version, dtype code, number of sequences, length of the document index), then for every sequence its length in tokens
(int32), for every sequence its byte offset in the .bin (int64), and the document index (int64): 0, and the sequence
count after each document. For a GPT dataset one sequence is one document.
"""

from __future__ import annotations

import struct
from array import array
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import NamedTuple, Self

import numpy as np

from megajax.config.base import ConfigError
from megajax.data.files import atomic_write

_HEADER = struct.Struct("<9sQBQQ")
_MAGIC = b"MMIDIDX\0\0"
_VERSION = 1
_DTYPES = {code: np.dtype(name) for code, name in {1: "u1", 2: "i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}.items()}
_CODES = {dtype: code for code, dtype in _DTYPES.items()}


def token_dtype(vocab_size: int) -> np.dtype:
    """Return Megatron's choice of token width: 16 bits for vocabularies below 65,500 (before padding), else 32."""
    return np.dtype("<u2") if vocab_size < 65500 else np.dtype("<i4")


def byte_pointers(lengths: np.ndarray, itemsize: int) -> np.ndarray:
    """Return where each sequence starts in the .bin, in bytes, int64: lengths are int32 and their sum is not."""
    ends = np.cumsum(lengths, dtype=np.int64) * itemsize
    return np.concatenate([np.zeros(min(1, len(ends)), np.int64), ends[:-1]])


class IndexedDataset:
    """The sequences of one `.bin/.idx` pair, read through the page cache.

    Attributes:
        lengths: tokens per sequence, int32.
        pointers: byte offset of each sequence in the .bin, int64.
        document_index: 0, then the sequence count after each document, int64.
        dtype: token type on disk; the file's header decides, never the vocabulary.

    Raises:
        ConfigError: a file is missing or breaks the format.
    """

    def __init__(self, prefix: str | Path):
        self.bin_path, idx_path = Path(f"{prefix}.bin"), Path(f"{prefix}.idx")
        for path in (self.bin_path, idx_path):
            if not path.is_file():
                raise ConfigError(f"{path}: no such file; name token files without .bin or .idx")
        index = _map_index(idx_path)
        self.dtype, self.lengths, self.pointers, self.document_index = index
        expected = int(self.lengths.sum(dtype=np.int64)) * self.dtype.itemsize
        found = self.bin_path.stat().st_size
        if found != expected:
            size = "shorter" if found < expected else "longer"
            raise ConfigError(
                f"{self.bin_path}: {size} than the index says: {found} bytes found, {expected} expected "
                f"({expected // self.dtype.itemsize} tokens of {self.dtype.name}); write the pair again"
            )
        _check_arrays(idx_path, index)
        # an empty file cannot be mapped
        self._tokens = np.memmap(self.bin_path, self.dtype, "r") if found else np.empty(0, self.dtype)

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, i: int) -> np.ndarray:
        """Return sequence `i` as a read-only view of the file."""
        return self.get(i)

    def get(self, i: int, offset: int = 0, length: int | None = None) -> np.ndarray:
        """Return up to `length` tokens of sequence `i` from token `offset` on, as a read-only view of the file."""
        start = int(self.pointers[i]) // self.dtype.itemsize
        end = start + int(self.lengths[i])
        start += offset
        return self._tokens[start : end if length is None else min(end, start + length)]


class _Index(NamedTuple):
    dtype: np.dtype
    lengths: np.ndarray
    pointers: np.ndarray
    document_index: np.ndarray


def _map_index(path: Path) -> _Index:
    """Check the header of a .idx file against the size of the file and map its arrays; nothing is allocated."""
    size = path.stat().st_size
    if size < _HEADER.size:
        raise ConfigError(f"{path}: {size} bytes are less than the {_HEADER.size} of a header; write the pair again")
    with path.open("rb") as file:
        magic, version, code, sequences, documents = _HEADER.unpack(file.read(_HEADER.size))
    if magic != _MAGIC:
        raise ConfigError(f"{path}: not a Megatron index (starts with {magic!r}, not {_MAGIC!r}); write the pair again")
    if version != _VERSION:
        raise ConfigError(f"{path}: version {version} of the index format; only version {_VERSION} is known")
    if code not in _DTYPES:
        raise ConfigError(f"{path}: dtype code {code} is no token type (known codes: {', '.join(map(str, _DTYPES))})")
    expected = _HEADER.size + 12 * sequences + 8 * documents
    if size != expected:
        raise ConfigError(
            f"{path}: {size} bytes found, {expected} expected for {sequences} sequences and a document index of "
            f"{documents}; write the pair again"
        )
    raw = np.memmap(path, np.uint8, "r")
    dtype = _DTYPES[code]
    # views of the mapping; the 34-byte header leaves them unaligned, which numpy copes with
    lengths = np.frombuffer(raw, "<i4", sequences, _HEADER.size)
    pointers = np.frombuffer(raw, "<i8", sequences, _HEADER.size + 4 * sequences)
    document_index = np.frombuffer(raw, "<i8", documents, _HEADER.size + 12 * sequences)
    return _Index(dtype, lengths, pointers, document_index)


def _check_arrays(path: Path, index: _Index) -> None:
    """Check that the arrays of a .idx file agree with each other."""
    dtype, lengths, pointers, document_index = index
    if (lengths < 0).any():
        raise ConfigError(f"{path}: sequence {int(np.argmax(lengths < 0))} has a negative length; write the pair again")
    if not np.array_equal(pointers, byte_pointers(lengths, dtype.itemsize)):
        raise ConfigError(f"{path}: the byte offsets do not add up from the lengths; write the pair again")
    if not (len(document_index) and document_index[0] == 0 and document_index[-1] == len(lengths)):
        raise ConfigError(f"{path}: the document index does not run from 0 to the {len(lengths)} sequences")
    if (np.diff(document_index) < 0).any():
        raise ConfigError(f"{path}: the document index goes backwards; write the pair again")


class IndexedWriter:
    """Writes a `.bin/.idx` pair, byte for byte as Megatron does; use it as a context manager.

    Both files are written under temporary names. The .idx gets its name last and any older one is removed first, so no
    half-written pair ever opens; leaving the block with an error leaves nothing behind.
    """

    def __init__(self, prefix: str | Path, dtype: np.dtype):
        self._bin_path, self._idx_path = Path(f"{prefix}.bin"), Path(f"{prefix}.idx")
        self._dtype = np.dtype(dtype).newbyteorder("<")
        self._lengths, self._document_index = array("i"), array("q", [0])
        self._bin_path.parent.mkdir(parents=True, exist_ok=True)
        self._open_files = ExitStack()
        self._bin = self._open_files.enter_context(atomic_write(self._bin_path))

    def add_document(self, tokens: Sequence[int] | np.ndarray, lengths: Sequence[int] | None = None) -> None:
        """Append one document.

        Args:
            tokens: its token ids.
            lengths: tokens per sequence (sentence) of it; unset = one sequence, or none when there are no tokens.
        """
        ids = np.asarray(tokens, np.int64)
        limits = np.iinfo(self._dtype)
        if ids.size and not limits.min <= ids.min() <= ids.max() <= limits.max:
            wrong = ids[(ids < limits.min) | (ids > limits.max)][0]
            raise ConfigError(f"{self._bin_path}: token id {wrong} does not fit {self._dtype.name}")
        if lengths is None:
            lengths = [ids.size] if ids.size else []
        if sum(lengths) != ids.size:
            raise ConfigError(f"{self._bin_path}: sequence lengths {list(lengths)} for a document of {ids.size} tokens")
        self._bin.write(ids.astype(self._dtype).tobytes())
        self._lengths.extend(lengths)
        self._document_index.append(len(self._lengths))

    def finalize(self) -> None:
        """Give both files their names."""
        lengths = np.array(self._lengths, "<i4")
        header = (_MAGIC, _VERSION, _CODES[self._dtype], len(lengths), len(self._document_index))
        self._idx_path.unlink(missing_ok=True)
        self._open_files.close()
        with atomic_write(self._idx_path) as file:
            file.write(_HEADER.pack(*header))
            file.write(lengths.tobytes())
            file.write(byte_pointers(lengths, self._dtype.itemsize).astype("<i8").tobytes())
            file.write(np.array(self._document_index, "<i8").tobytes())

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.finalize()
        else:
            self._open_files.__exit__(kind, error, trace)
