"""Checks that token files hold no ids outside the vocabulary of their tokenizer.

Writers of token files here note the range of their ids in `PREFIX.ids.json` beside them. A file without a note of its
present contents is searched: the first half GiB before training, the rest a little with every batch. Each of several
processes searches its own share of the pieces.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import NamedTuple, NoReturn, Protocol

import numpy as np

from megajax.config.base import InputError
from megajax.data.cache import fingerprint
from megajax.files import atomic_write

_PEEK = 1 << 15
_AT_START, _WITH_A_BATCH = 1 << 29, 1 << 24
"""Bytes that are searched at the start, and with every batch."""


class TokenFile(Protocol):
    """The parts of an open pair of token files that are used here (see `data.indexed.IndexedDataset`)."""

    bin_path: Path
    total: int
    lengths: np.ndarray
    pointers: np.ndarray
    document_index: np.ndarray
    dtype: np.dtype

    def span(self, start: int, stop: int) -> np.ndarray:
        """Return the tokens `start` to `stop` of the whole file."""


class Found(NamedTuple):
    """An id, and the number of the token in the file at which it occurs first."""

    token: int
    place: int


class IdRange:
    """Find the smallest and the largest id of a file, piece by piece."""

    def __init__(self) -> None:
        self._seen = 0
        self.ends: list[Found] = []
        """Smallest and largest of the tokens so far; empty before the first."""

    def add(self, tokens: np.ndarray) -> None:
        """Include the next tokens of the file."""
        if len(tokens):
            low, high = int(tokens.min()), int(tokens.max())
            if not self.ends:
                self.ends = [self._found(tokens, low), self._found(tokens, high)]
            if low < self.ends[0].token:
                self.ends[0] = self._found(tokens, low)
            if high > self.ends[1].token:
                self.ends[1] = self._found(tokens, high)
            self._seen += len(tokens)

    def _found(self, tokens: np.ndarray, token: int) -> Found:
        return Found(token, self._seen + int(np.argmax(tokens == token)))

    def note(self, indexed: TokenFile) -> None:
        """Write the range beside the files, all of whose tokens have been added."""
        with atomic_write(note_path(indexed.bin_path)) as file:
            file.write(json.dumps({"contents": _contents(indexed), "smallest_and_largest": self.ends}).encode())


def note_path(bin_path: Path) -> Path:
    """Return the file for the note of the range of ids in a .bin."""
    return bin_path.with_name(f"{bin_path.name.removesuffix('.bin')}.ids.json")


def _noted(indexed: TokenFile) -> list[Found] | None:
    """Return the smallest and the largest id of a valid note (none for a file without tokens), or None without one."""
    try:
        note = json.loads(note_path(indexed.bin_path).read_bytes())
        ends = [Found(int(token), int(place)) for token, place in note["smallest_and_largest"]]
        return ends if note["contents"] == _contents(indexed) else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _contents(indexed: TokenFile) -> str:
    """Return a hash of the first and last tokens and lengths, and of the counts, which would differ in another file."""
    total, lengths = indexed.total, indexed.lengths
    ends = indexed.span(0, _PEEK), indexed.span(max(0, total - _PEEK), total), lengths[:_PEEK], lengths[-_PEEK:]
    return fingerprint(total, len(lengths), *ends)


class VocabularyScan:
    """Search for ids that a vocabulary lacks, before their samples are read.

    Args:
        vocab_size: size of the vocabulary, whose ids are 0 to this minus one.
    """

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._unknown: list[TokenFile] = []
        self._left: Iterator[tuple[TokenFile, int, int]] | None = None
        self._lock = threading.Lock()

    def add(self, indexed: TokenFile) -> None:
        """Check a file by its note, or have it searched.

        Raises:
            InputError: the file holds an id outside the vocabulary.
        """
        ends = _noted(indexed)
        if ends is None:
            self._unknown.append(indexed)
        for found in ends or []:
            if not 0 <= found.token < self._vocab_size:
                self._refuse(indexed, found)

    def start(self, share: tuple[int, int] = (0, 1)) -> None:
        """Search the beginnings of all files without a note, which is all of them if they are small.

        Args:
            share: number of this process, and count of processes that share the work.

        Raises:
            InputError: an id is outside the vocabulary.
        """
        first, count = share
        size = _AT_START // max(1, len(self._unknown))
        begun = [(indexed, size // indexed.dtype.itemsize) for indexed in self._unknown]
        beginnings = _pieces((indexed, 0, min(stop, indexed.total)) for indexed, stop in begun)
        rest = _pieces((indexed, start, indexed.total) for indexed, start in begun)
        for piece in islice(beginnings, first, None, count):
            self._look(*piece)
        self._left = islice(rest, first, None, count)

    def go_on(self) -> None:
        """Search one more piece of 16 MiB.

        Raises:
            InputError: an id is outside the vocabulary.
        """
        if self._left is None or not self._lock.acquire(blocking=False):
            return
        try:
            piece = next(self._left, None)
        finally:
            self._lock.release()
        if piece is None:
            self._left = None
        else:
            self._look(*piece)

    def _look(self, indexed: TokenFile, start: int, stop: int) -> None:
        tokens = indexed.span(start, stop)
        for token in _strays(tokens, self._vocab_size):
            self._refuse(indexed, Found(token, start + int(np.argmax(tokens == token))))

    def _refuse(self, indexed: TokenFile, found: Found) -> NoReturn:
        sequence = np.searchsorted(indexed.pointers, found.place * indexed.dtype.itemsize, side="right") - 1
        document = np.searchsorted(indexed.document_index, sequence, side="right") - 1
        raise _outside(indexed.bin_path, found.token, self._vocab_size, f" (document {document})")


def _pieces(spans: Iterable[tuple[TokenFile, int, int]]) -> Iterator[tuple[TokenFile, int, int]]:
    """Cut spans of tokens into pieces that are searched at a time."""
    for indexed, first, end in spans:
        size = _WITH_A_BATCH // indexed.dtype.itemsize
        yield from ((indexed, start, min(start + size, end)) for start in range(first, end, size))


def check_vocabulary(tokens: np.ndarray, vocab_size: int, path: Path) -> None:
    """Refuse ids, read from the file `path`, that a vocabulary does not have."""
    for token in _strays(tokens, vocab_size):
        raise _outside(path, token, vocab_size)


def _strays(tokens: np.ndarray, vocab_size: int) -> list[int]:
    """Return the largest and the smallest token, as far as the vocabulary does not have them."""
    ends = (int(tokens.max(initial=0)), int(tokens.min(initial=0)))
    return [token for token in ends if not 0 <= token < vocab_size]


def _outside(path: Path, token: int, vocab_size: int, where: str = "") -> InputError:
    return InputError(
        f"{path}: token id {token} outside the vocabulary of {vocab_size}{where}; "
        "the file was written with another tokenizer: set tokenizer.* to that one"
    )
