"""The documents of a source that belong to a split, and datasets of whatever kind of them."""

from __future__ import annotations

import logging
from functools import cache
from pathlib import Path
from typing import NamedTuple

import numpy as np

from megajax.config.base import InputError
from megajax.config.data import DataConfig
from megajax.data.blend import Source
from megajax.data.cache import fingerprint
from megajax.data.chain import Order
from megajax.data.gpt import GPTDataset
from megajax.data.indexed import IndexedDataset
from megajax.data.kinds import build_split
from megajax.data.mock import MockDocuments
from megajax.data.splits import document_range
from megajax.data.tokenizers import Tokenizer
from megajax.data.vocabulary import VocabularyScan

log = logging.getLogger(__name__)

_PEEK = 1 << 15
_LOOK = 5
"""Documents whose beginning is looked at."""


class Part(NamedTuple):
    """The documents of one source that belong to one split."""

    source: Source
    documents: IndexedDataset | MockDocuments
    indices: np.ndarray
    """Sequences for a GPT, documents otherwise, int32."""
    split: str

    @property
    def tokens(self) -> int:
        """How many tokens they have, where a sequence is a document."""
        return int(self.documents.lengths[self.indices].sum(dtype=np.int64))

    @property
    def identity(self) -> str:
        """Hash of the lengths of its documents and of the first and last tokens of the file."""
        total = int(self.documents.lengths.sum(dtype=np.int64))
        starts, stops = np.array([0, max(0, total - _PEEK)]), np.array([min(_PEEK, total), total])
        return fingerprint(self.documents.lengths, self.indices, self.documents.gather(starts, stops))


class Maker:
    """Opens sources, every token file once, and makes datasets of their parts.

    Args:
        config: what samples are.
        seed: of the sample order.
        tokenizer: ids outside its vocabulary are refused.
        kind: gpt, bert, t5 or instruction.
        pair_task: bert: samples are two parts.
    """

    def __init__(self, config: DataConfig, seed: int, tokenizer: Tokenizer, kind: str, pair_task: bool):
        self._config, self._seed, self._tokenizer = config, seed, tokenizer
        self._kind, self._pair_task = kind, pair_task
        self.scan = VocabularyScan(tokenizer.vocab_size)
        self._open = cache(self._opened)
        if kind != "gpt" and (config.mock or config.fim_rate):
            raise InputError(f"data.mock and data.fim_rate are for gpt samples, not for {kind}: leave them unset")

    def part(self, source: Source, bounds: tuple[float, float], split: str) -> Part:
        """Take the documents of a source between two fractions of their number; a warning if that is none."""
        documents = self._mock() if self._config.mock else self._open(source.prefix)
        count = len(documents)
        if self._kind != "gpt":
            count = len(self._open(source.prefix).document_index) - 1
        indices = np.array(document_range(bounds, count), np.int32)
        if not indices.size:
            log.warning("%s: its %d documents leave none for the %s split", source.prefix, count, split)
        elif split == "train" and self._kind == "gpt" and isinstance(documents, IndexedDataset):
            some = [int(documents.get(int(i), length=1)[0]) for i in indices[:_LOOK] if documents.lengths[i]]
            _check_beginning(set(some), self._tokenizer, source.prefix)
        return Part(source, documents, indices, split)

    def one_epoch(self, part: Part) -> Order | None:
        """Make the samples of one epoch of a part that is not trained on; nothing and a warning if there are none."""
        if self._kind == "gpt" and part.tokens <= self._config.seq_length:
            log.warning(
                "%s: the %d tokens of its %s split make no sample of %d: left out",
                part.source.prefix, part.tokens, part.split, self._config.seq_length,
            )  # fmt: skip
            return None
        try:
            return self.dataset(part, None)
        except InputError as error:  # what is wrong with the settings has shown in the training split
            if part.split == "train" or self._kind == "gpt":
                raise
            log.warning("%s: left out", error)
            return None

    def dataset(self, part: Part, num_samples: int | None, order: int = 0) -> Order:
        """Make at least `num_samples` (None: one epoch); other orders of the same documents are shuffled otherwise."""
        seed, cache_dir = (self._seed + order) % 2**32, self.cache_dir(part)
        source, indices, split = part.documents, part.indices, part.split
        if isinstance(source, MockDocuments) or self._kind == "gpt":
            return GPTDataset(source, indices, num_samples, self._config, seed, split, self._tokenizer, cache_dir)
        return build_split(
            self._kind, source, indices, num_samples, self._config, pair_task=self._pair_task, seed=seed, name=split,
            tokenizer=self._tokenizer, cache_dir=cache_dir,
        )  # fmt: skip

    def cache_dir(self, part: Part) -> Path | None:
        """Where sample orders of a part are kept; nowhere if nobody said so and there is no file to be beside of."""
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
    """Warn where documents do not begin as prompts do.

    Args:
        first: the first tokens of some documents.
        tokenizer: says what stands before prompts.
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
