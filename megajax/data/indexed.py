"""Megatron's token files: `PREFIX.bin` holds the tokens, `PREFIX.idx` the place of each sequence in it.

Layout of the .idx, little-endian and unpadded (Megatron-LM IndexedDataset, version 1): a 34-byte header (magic,
version, dtype code, number of sequences, length of the document index), then for every sequence its length in tokens
(int32), for every sequence its byte offset in the .bin (int64), and the document index (int64): 0, and the sequence
count after each document. For a GPT dataset one sequence is one document.
"""

from __future__ import annotations

import struct
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, Generic, NamedTuple, Protocol, Self, TypeVar

import numpy as np

from megajax.config.base import InputError
from megajax.data.cache import map_file
from megajax.data.vocabulary import IdRange, note_path
from megajax.files import atomic_write, remove_leftovers

_HEADER = struct.Struct("<9sQBQQ")
_MAGIC = b"MMIDIDX\0\0"
_VERSION = 1
_DTYPES = {code: np.dtype(name) for code, name in {1: "u1", 2: "i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}.items()}
_CODES = {dtype: code for code, dtype in _DTYPES.items()}
_BUFFER = 1 << 14
_LONGEST = 2**31 - 1
"""Largest number of tokens in a sequence, as lengths are int32."""


def token_dtype(vocab_size: int) -> np.dtype:
    """Return Megatron's choice of token width: 16 bits for vocabularies below 65,500 (before padding), else 32."""
    return np.dtype("<u2") if vocab_size < 65500 else np.dtype("<i4")


def byte_pointers(lengths: np.ndarray, itemsize: int) -> np.ndarray:
    """Return the byte where each sequence starts in the .bin, int64 because sums of int32 lengths exceed int32."""
    ends = np.cumsum(lengths, dtype=np.int64) * itemsize
    return np.concatenate([np.zeros(min(1, len(ends)), np.int64), ends[:-1]])


class IndexedDataset:
    """Read the sequences of one `.bin/.idx` pair through the page cache.

    Attributes:
        lengths: number of tokens of each sequence, int32.
        pointers: byte offset of each sequence in the .bin, int64.
        document_index: 0, then the sequence count after each document, int64.
        dtype: token type on disk, which the file's header decides and never the vocabulary.
        total: number of tokens in the file.

    Raises:
        InputError: a file is missing or breaks the format.
    """

    def __init__(self, prefix: str | Path):
        self.bin_path, idx_path = Path(f"{prefix}.bin"), Path(f"{prefix}.idx")
        for path in (self.bin_path, idx_path):
            if Path(prefix).is_dir() and not path.exists():
                raise InputError(f"{prefix} is a folder: name its token files, {named_pairs(Path(prefix))}")
            if not path.is_file():
                raise InputError(f"{path}: no such file; name token files without .bin or .idx")
        index = map_index(idx_path)
        self.dtype, self.lengths, self.pointers, self.document_index = index
        expected = int(self.lengths.sum(dtype=np.int64)) * self.dtype.itemsize
        found = self.bin_path.stat().st_size
        if found != expected:
            size = "shorter" if found < expected else "longer"
            raise InputError(
                f"{self.bin_path}: {size} than the index says: {found} bytes found, {expected} expected "
                f"({expected // self.dtype.itemsize} tokens of {self.dtype.name}); write the pair again"
            )
        _check_arrays(idx_path, index)
        self.total = expected // self.dtype.itemsize
        self._tokens = map_file(self.bin_path).view(self.dtype)

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, i: int) -> np.ndarray:
        """Return sequence `i` as a read-only view of the file."""
        return self.get(i)

    def get(self, i: int, offset: int = 0, length: int | None = None) -> np.ndarray:
        """Return up to `length` tokens of sequence `i`, from token `offset` on, as a read-only view of the file."""
        start = int(self.pointers[i]) // self.dtype.itemsize
        end = start + int(self.lengths[i])
        start += offset
        return self._tokens[start : end if length is None else min(end, start + length)]

    def span(self, start: int, stop: int) -> np.ndarray:
        """Return the tokens `start` to `stop` of the whole file as a read-only view."""
        return self._tokens[start:stop]

    def gather(self, starts: np.ndarray, stops: np.ndarray) -> np.ndarray:
        """Return a copy of the tokens from each start to its stop, joined; numbers count through the whole file."""
        return np.concatenate([self._tokens[i:j] for i, j in zip(starts.tolist(), stops.tolist(), strict=True)])


def named_pairs(folder: Path) -> str:
    """Return the prefixes of the token files in a folder, for messages."""
    names = sorted(str(path.with_suffix("")) for path in folder.glob("*.idx"))
    shown = ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
    return f"such as {shown}" if names else "of which it holds none"


class Index(NamedTuple):
    """The contents of a .idx file, with the arrays of `IndexedDataset`."""

    dtype: np.dtype
    lengths: np.ndarray
    pointers: np.ndarray
    document_index: np.ndarray


def map_index(path: Path) -> Index:
    """Check the header of a .idx file against its size and map its arrays, without allocating memory."""
    size = path.stat().st_size
    if size < _HEADER.size:
        raise InputError(f"{path}: {size} bytes are less than the {_HEADER.size} of a header; write the pair again")
    with path.open("rb") as file:
        magic, version, code, sequences, documents = _HEADER.unpack(file.read(_HEADER.size))
    if magic != _MAGIC:
        raise InputError(f"{path}: not a Megatron index (starts with {magic!r}, not {_MAGIC!r}); write the pair again")
    if version != _VERSION:
        raise InputError(f"{path}: version {version} of the index format; only version {_VERSION} is known")
    if code not in _DTYPES:
        raise InputError(f"{path}: dtype code {code} is no token type (known codes: {', '.join(map(str, _DTYPES))})")
    expected = _HEADER.size + 12 * sequences + 8 * documents
    if size != expected:
        raise InputError(
            f"{path}: {size} bytes found, {expected} expected for {sequences} sequences and a document index of "
            f"{documents}; write the pair again"
        )
    raw = map_file(path)
    dtype = _DTYPES[code]
    # Views of the mapping: the 34-byte header leaves them unaligned, which numpy handles.
    lengths = np.frombuffer(raw, "<i4", sequences, _HEADER.size)
    pointers = np.frombuffer(raw, "<i8", sequences, _HEADER.size + 4 * sequences)
    document_index = np.frombuffer(raw, "<i8", documents, _HEADER.size + 12 * sequences)
    return Index(dtype, lengths, pointers, document_index)


def _check_arrays(path: Path, index: Index) -> None:
    """Check that the arrays of a .idx file agree with each other."""
    dtype, lengths, pointers, document_index = index
    if (lengths < 0).any():
        raise InputError(f"{path}: sequence {int(np.argmax(lengths < 0))} has a negative length; write the pair again")
    if not np.array_equal(pointers, byte_pointers(lengths, dtype.itemsize)):
        raise InputError(f"{path}: the byte offsets do not add up from the lengths; write the pair again")
    if not (len(document_index) and document_index[0] == 0 and document_index[-1] == len(lengths)):
        raise InputError(f"{path}: the document index does not run from 0 to the {len(lengths)} sequences")
    if (np.diff(document_index) < 0).any():
        raise InputError(f"{path}: the document index goes backwards; write the pair again")


@contextmanager
def new_pair(prefix: str | Path) -> Iterator[tuple[BinaryIO, BinaryIO]]:
    """Open a `.bin` and a `.idx` for writing.

    Both get their names when the block ends without an error. An older .idx is removed first and the new one gets its
    name last, so a half-written pair can never be opened. An error in the block leaves nothing behind.
    """
    bin_path, idx_path = Path(f"{prefix}.bin"), Path(f"{prefix}.idx")
    bin_path.parent.mkdir(parents=True, exist_ok=True)
    remove_leftovers(bin_path, idx_path, note_path(bin_path))
    with atomic_write(idx_path) as index, atomic_write(bin_path) as tokens:
        yield tokens, index
        index.flush()  # a full disk shows before the older pair is removed
        tokens.flush()
        for older in (note_path(bin_path), idx_path):
            older.unlink(missing_ok=True)


def write_index(file: BinaryIO, parts: Callable[[], Iterable[Index]]) -> None:
    """Write a .idx whose documents are those of some parts, one after another.

    Args:
        file: file to write to.
        parts: function that iterates over the parts, all of one token type; it is called for every section of the file,
            so that only one part is in memory at a time.
    """
    sequences = documents = 0
    for part in parts():
        code, sequences, documents = (
            _CODES[part.dtype],
            sequences + len(part.lengths),
            documents + len(part.document_index) - 1,
        )
    file.write(_HEADER.pack(_MAGIC, _VERSION, code, sequences, documents + 1))
    for part in parts():
        file.write(part.lengths.astype("<i4").data)
    start = 0
    for part in parts():
        file.write((part.pointers + start).astype("<i8").data)
        start += int(part.lengths.sum(dtype=np.int64)) * part.dtype.itemsize
    file.write(bytes(8))
    start = 0
    for part in parts():
        file.write((part.document_index[1:] + start).astype("<i8").data)
        start += len(part.lengths)


class IndexedWriter:
    """Write a `.bin/.idx` pair, byte for byte as Megatron does, and the range of its ids beside it.

    Use it as a context manager (see `new_pair`).
    """

    def __init__(self, prefix: str | Path, dtype: np.dtype):
        self._prefix = prefix
        self._dtype = np.dtype(dtype).newbyteorder("<")
        self._lengths, self._document_index = array("i"), array("q", [0])
        self._buffer, self._filled = np.empty(_BUFFER, np.int64), 0
        self._ids = IdRange()
        self._open_files = ExitStack()
        self._bin, self._idx = self._open_files.enter_context(new_pair(prefix))

    def add_document(self, tokens: Sequence[int] | np.ndarray, lengths: Sequence[int] | None = None) -> None:
        """Append one document.

        Args:
            tokens: token ids of the document.
            lengths: number of tokens of each of its sequences (sentences); unset = one sequence, or none if there are
                no tokens.

        Raises:
            InputError: the lengths do not add up, a sequence is too long for the format, or (perhaps only at the end of
                the block) an id does not fit the type.
        """
        count = len(tokens)
        if (longest := count if lengths is None else max(lengths, default=0)) > _LONGEST:
            raise InputError(f"{self._prefix}: a sequence of {longest} tokens; the format holds {_LONGEST}: cut it up")
        if lengths is not None:
            if sum(lengths) != count:
                raise InputError(f"{self._prefix}: sequence lengths {list(lengths)} for a document of {count} tokens")
            self._lengths.extend(lengths)
        elif count:
            self._lengths.append(count)
        self._document_index.append(len(self._lengths))
        start = self._filled
        if start + count > _BUFFER:
            self._empty_buffer()
            start = 0
        if count > _BUFFER:
            self._write(np.asarray(tokens, np.int64))
            return
        self._filled = end = start + count
        if isinstance(tokens, np.ndarray):
            self._buffer[start:end] = tokens
        else:
            struct.pack_into(f"={count}q", self._buffer.data, 8 * start, *tokens)  # faster than a list in NumPy

    def _empty_buffer(self) -> None:
        self._write(self._buffer[: self._filled])
        self._filled = 0

    def _write(self, tokens: np.ndarray) -> None:
        self._ids.add(tokens)
        limits = np.iinfo(self._dtype)
        for token, _ in self._ids.ends:
            if not limits.min <= token <= limits.max:
                raise InputError(f"{self._prefix}: token id {token} does not fit {self._dtype.name}")
        self._bin.write(tokens.astype(self._dtype).data)

    def _write_index(self) -> None:
        self._empty_buffer()
        lengths = np.frombuffer(self._lengths, np.int32)
        document_index = np.frombuffer(self._document_index, np.int64)
        index = Index(self._dtype, lengths, byte_pointers(lengths, self._dtype.itemsize), document_index)
        write_index(self._idx, lambda: [index])

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            with self._open_files:
                self._write_index()
            self._ids.note(IndexedDataset(self._prefix))
        else:
            self._open_files.__exit__(kind, error, trace)


class Tokens(Protocol):
    """Provide sequences from which samples can be cut: those of an `IndexedDataset`, or made-up ones."""

    bin_path: Path
    dtype: np.dtype
    lengths: np.ndarray
    pointers: np.ndarray

    def gather(self, starts: np.ndarray, stops: np.ndarray) -> np.ndarray:
        """Return the tokens from each start to its stop, joined; tokens are numbered through the whole file."""
        ...


T = TypeVar("T", bound=Tokens)


class Selection(NamedTuple, Generic[T]):
    """Select documents of a token file and the samples wanted of them."""

    indexed: T
    """Token file, in which a sequence is a document, a sentence of one, or a turn of a conversation."""
    indices: np.ndarray
    """Numbers of the sequences, or documents, that may be used, int32."""
    num_samples: int | None
    """Smallest number of samples, over as many epochs as needed; None = one epoch."""
    seed: int
    """Seed of the sample order and, together with a sample's number, of the random numbers in that sample."""
    name: str
    """Name of the split, for messages."""
    cache_dir: Path | None
    """Folder in which the order is kept; None = nowhere."""

    @property
    def bounds(self: Selection[Any]) -> np.ndarray:
        """Return the first sequence of every document and the sequence after its last one, int64 [documents, 2]."""
        starts = self.indexed.document_index
        return np.stack([starts[self.indices], starts[self.indices + 1]], axis=1)

    @property
    def where(self) -> str:
        """Return the names of file and split, for messages."""
        return f"{self.indexed.bin_path}: the {self.name} split"
