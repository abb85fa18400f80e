"""Sources of text: the documents of a source that belong to a split, and datasets of any kind made of them.

The parts of a source for training, validation and test are contiguous ranges of its documents, never shuffled, as with
Megatron-LM's `--split`: validation and test use the tail of the file. Made-up documents serve speed and smoke tests
without any file (Megatron-LM's --mock-data).
"""

from __future__ import annotations

import logging
import math
import re
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from megajax.config.base import InputError
from megajax.data.blend import Source
from megajax.data.cache import fingerprint
from megajax.data.dataset import Order
from megajax.data.indexed import IndexedDataset, Selection
from megajax.data.samples import KINDS, Recipe
from megajax.data.tokenizers import Tokenizer
from megajax.data.vocabulary import VocabularyScan

log = logging.getLogger(__name__)

_PEEK = 1 << 15
_LOOK = 5
"""Number of documents whose beginning is checked."""
MOCK_SPLIT = "1,1,1"
_DOCUMENTS, _LONGEST = 100_000, 4096
SPLITS = ("train", "valid", "test")


class Part(NamedTuple):
    """The documents of one source that belong to one split."""

    source: Source
    documents: IndexedDataset | MockDocuments
    indices: np.ndarray
    """Numbers of the sequences if each is a document, else of the documents, int32."""
    split: str

    @property
    def tokens(self) -> int:
        """Return the number of tokens in the documents, if a sequence is a document."""
        return int(self.documents.lengths[self.indices].sum(dtype=np.int64))

    @property
    def identity(self) -> str:
        """Return a hash of the documents' lengths and of the first and last tokens of the file."""
        total = int(self.documents.lengths.sum(dtype=np.int64))
        starts, stops = np.array([0, max(0, total - _PEEK)]), np.array([min(_PEEK, total), total])
        return fingerprint(self.documents.lengths, self.indices, self.documents.gather(starts, stops))


class Maker:
    """Open sources, every token file once, and make datasets of their parts.

    Args:
        recipe: settings by which samples are made of documents.
        seed: seed of the sample order.
    """

    def __init__(self, recipe: Recipe, seed: int):
        self._recipe, self._seed = recipe, seed
        self._config, self._tokenizer, self._kind = recipe.config, recipe.tokenizer, KINDS[recipe.kind]
        self.scan = VocabularyScan(self._tokenizer.vocab_size)
        self._open = cache(self._opened)
        if not self._kind.joined and (self._config.mock or self._config.fim_rate):
            raise InputError(
                f"data.mock and data.fim_rate are for gpt samples, not for {recipe.kind}: leave them unset"
            )

    def part(self, source: Source, bounds: tuple[float, float], split: str) -> Part:
        """Return the documents of a source between two fractions of their number, with a warning if there are none."""
        documents = self._mock() if self._config.mock else self._open(source.prefix)
        count = len(documents) if self._kind.joined else len(self._open(source.prefix).document_index) - 1
        indices = np.array(document_range(bounds, count), np.int32)
        if not indices.size:
            log.warning("%s: its %d documents leave none for the %s split", source.prefix, count, split)
        elif split == "train" and self._kind.joined and isinstance(documents, IndexedDataset):
            some = [int(documents.get(int(i), length=1)[0]) for i in indices[:_LOOK] if documents.lengths[i]]
            _check_beginning(set(some), self._tokenizer, source.prefix)
        return Part(source, documents, indices, split)

    def one_epoch(self, part: Part) -> Order | None:
        """Make the samples of one epoch of a part for evaluation; return None with a warning if there are none."""
        if self._kind.joined and part.tokens <= self._config.seq_length:
            log.warning(
                "%s: the %d tokens of its %s split make no sample of %d: left out",
                part.source.prefix, part.tokens, part.split, self._config.seq_length,
            )  # fmt: skip
            return None
        try:
            return self.dataset(part, None)
        except InputError as error:  # wrong settings have shown in the training split
            if part.split == "train" or self._kind.joined:
                raise
            log.warning("%s: left out", error)
            return None

    def dataset(self, part: Part, num_samples: int | None, order: int = 0) -> Order:
        """Make at least `num_samples` samples (None: one epoch); each `order` shuffles the documents differently."""
        seed, where = (self._seed + order) % 2**32, self.cache_dir(part)
        selection: Selection[Any] = Selection(part.documents, part.indices, num_samples, seed, part.split, where)
        return self._kind.dataset(selection, self._recipe)

    def cache_dir(self, part: Part) -> Path | None:
        """Return the folder for sample orders of a part, or None if none is configured and there is no file beside
        which to put it.
        """
        if self._config.cache_dir:
            return Path(self._config.cache_dir)
        return None if self._config.mock else Path(part.source.prefix).parent / "cache"

    def _opened(self, prefix: str) -> IndexedDataset:
        indexed = IndexedDataset(prefix)
        self.scan.add(indexed)
        return indexed

    @cache  # noqa: B019 - lives as long as the run
    def _mock(self) -> MockDocuments:
        return MockDocuments(self._tokenizer.vocab_size, self._tokenizer.eod_id)


def _check_beginning(first: set[int], tokenizer: Tokenizer, where: str) -> None:
    """Warn if documents do not begin as prompts do.

    Args:
        first: first tokens of some documents.
        tokenizer: tokenizer, which knows the tokens before prompts.
        where: name of the file.
    """
    bos = tokenizer.bos_id
    if tokenizer.prefix and tokenizer.prefix[0] not in first:
        log.warning(
            "%s: documents do not begin with id %d, which the tokenizer puts before prompts: "
            "tokenize them again with --append-bos, or set tokenizer.bos=false",
            where, tokenizer.prefix[0],
        )  # fmt: skip
    if not tokenizer.prefix and bos is not None and first == {bos}:
        log.warning(
            "%s: documents begin with id %d, the beginning of sequence, and prompts will not: set tokenizer.bos=true",
            where, bos,
        )  # fmt: skip


class MockDocuments:
    """Provide documents of 1 to 4,095 tokens that count up from 1, with an end-of-document id at their end.

    It takes the place of `IndexedDataset`, and makes up tokens when they are read.

    Args:
        vocab_size: size of the vocabulary; ids count modulo this.
        eod: id of the end of a document.
    """

    def __init__(self, vocab_size: int, eod: int):
        self._vocab_size, self._eod = vocab_size, eod
        self.bin_path, self.dtype = Path("mock documents"), np.dtype(np.int32)
        self.lengths = np.random.default_rng(0).integers(1, _LONGEST, _DOCUMENTS, np.int32)
        self._ends = np.cumsum(self.lengths, dtype=np.int64)
        self.pointers = (self._ends - self.lengths) * self.dtype.itemsize

    def __len__(self) -> int:
        return len(self.lengths)

    def gather(self, starts: np.ndarray, stops: np.ndarray) -> np.ndarray:
        """Return the tokens from each start to its stop, joined; tokens are numbered through all documents."""
        lengths = stops - starts
        places = np.arange(lengths.sum()) + np.repeat(stops - np.cumsum(lengths), lengths)
        documents = np.searchsorted(self._ends, places, side="right")
        left = self._ends[documents] - places
        counted = (self.lengths[documents] - left + 1) % self._vocab_size
        return np.where(left == 1, self._eod, counted).astype(self.dtype)


def parse_split(text: str) -> dict[str, tuple[float, float] | None]:
    """Parse relative sizes such as "969,30,1" into the fractions of the documents between which each split lies.

    Splits of size 0 are None; sizes left out at the end are 0.
    """
    words = [word for word in re.split(r"[\s,/]+", text.strip()) if word]
    try:
        sizes = [float(word) for word in words]
    except ValueError:
        raise InputError(f"split {text!r}: not a list of numbers such as 969,30,1") from None
    if not 0 < len(sizes) <= len(SPLITS):
        raise InputError(f"split {text!r}: {len(sizes)} sizes; give one for each of {', '.join(SPLITS)}")
    total = sum(sizes)
    if any(not 0 <= size < math.inf for size in sizes) or total == 0:
        raise InputError(f"split {text!r}: sizes must be finite, not negative and not all 0")
    sizes += [0.0] * (len(SPLITS) - len(sizes))
    edges = [0.0]
    for size in sizes:
        edges.append(edges[-1] + size / total)
    return {
        name: (low, high) if low != high else None
        for name, low, high in zip(SPLITS, edges[:-1], edges[1:], strict=True)
    }


def document_range(bounds: tuple[float, float], documents: int) -> range:
    """Return the documents of a split; fractions of the count are rounded half to even as in Python and Megatron."""
    low, high = bounds
    return range(round(low * documents), round(high * documents))
