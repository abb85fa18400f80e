"""Token files against the vocabulary of the tokenizer that is to read them.

Whoever writes token files here notes the range of their ids in `PREFIX.ids.json` beside them; a file without a note of
its own contents is looked through: the first half GiB before training, the rest a little with every batch. Of several
processes each looks through its own share of the pieces.
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
"""Bytes that are looked through."""


class TokenFile(Protocol):
    """An open pair of token files, as far as its ids concern (`megajax.data.indexed.IndexedDataset`)."""

    bin_path: Path
    total: int
    lengths: np.ndarray
    pointers: np.ndarray
    document_index: np.ndarray
    dtype: np.dtype

    def span(self, start: int, stop: int) -> np.ndarray:
        """Return the tokens of the whole file from one to another."""


class Found(NamedTuple):
    """An id and the token of the file where it is first."""

    token: int
    place: int


class IdRange:
    """The smallest and the largest id of a file, gathered piece by piece."""

    def __init__(self) -> None:
        self._seen = 0
        self.ends: list[Found] = []
        """Smallest and largest of the tokens so far; empty before the first."""

    def add(self, tokens: np.ndarray) -> None:
        """Take in the next tokens of the file."""
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
        """Write it beside the files, whose tokens all were taken in."""
        with atomic_write(note_path(indexed.bin_path)) as file:
            file.write(json.dumps({"contents": _contents(indexed), "smallest_and_largest": self.ends}).encode())


def note_path(bin_path: Path) -> Path:
    """Return the file in which the range of ids of a .bin is noted."""
    return bin_path.with_name(f"{bin_path.name.removesuffix('.bin')}.ids.json")


def _noted(indexed: TokenFile) -> list[Found] | None:
    """Read the smallest and the largest id that were noted, none of a file without tokens; None without a good note."""
    try:
        note = json.loads(note_path(indexed.bin_path).read_bytes())
        ends = [Found(int(token), int(place)) for token, place in note["smallest_and_largest"]]
        return ends if note["contents"] == _contents(indexed) else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _contents(indexed: TokenFile) -> str:
    """Hash of the first and last tokens and lengths, and of the numbers of them all: what another file would have."""
    total, lengths = indexed.total, indexed.lengths
    ends = indexed.span(0, _PEEK), indexed.span(max(0, total - _PEEK), total), lengths[:_PEEK], lengths[-_PEEK:]
    return fingerprint(total, len(lengths), *ends)


class VocabularyScan:
    """Looks for ids that a vocabulary lacks, before their samples are read.

    Args:
        vocab_size: ids are 0 to this minus one.
    """

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._unknown: list[TokenFile] = []
        self._left: Iterator[tuple[TokenFile, int, int]] | None = None
        self._lock = threading.Lock()

    def add(self, indexed: TokenFile) -> None:
        """Check a file by its note, or see to it that it is looked through.

        Raises:
            InputError: it holds an id outside the vocabulary.
        """
        ends = _noted(indexed)
        if ends is None:
            self._unknown.append(indexed)
        for found in ends or []:
            if not 0 <= found.token < self._vocab_size:
                self._refuse(indexed, found)

    def start(self, share: tuple[int, int] = (0, 1)) -> None:
        """Look through the beginnings of all files that have no note, which is all of them if they are small.

        Args:
            share: number of this process, and how many share the work.

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
        """Look through a piece more, 16 MiB.

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
    """Cut spans of tokens into what is looked through at a time."""
    for indexed, first, end in spans:
        size = _WITH_A_BATCH // indexed.dtype.itemsize
        yield from ((indexed, start, min(start + size, end)) for start in range(first, end, size))


def check_vocabulary(tokens: np.ndarray, vocab_size: int, path: Path) -> None:
    """Refuse ids, read from the file `path`, that a vocabulary does not have."""
    for token in _strays(tokens, vocab_size):
        raise _outside(path, token, vocab_size)


def _strays(tokens: np.ndarray, vocab_size: int) -> list[int]:
    """Return the largest and the smallest token if a vocabulary does not have them."""
    ends = (int(tokens.max(initial=0)), int(tokens.min(initial=0)))
    return [token for token in ends if not 0 <= token < vocab_size]


def _outside(path: Path, token: int, vocab_size: int, where: str = "") -> InputError:
    return InputError(
        f"{path}: token id {token} outside the vocabulary of {vocab_size}{where}; "
        "the file was written with another tokenizer: set tokenizer.* to that one"
    )
