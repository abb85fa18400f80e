"""Shards, the units of preprocessing: each is a part of the input, tokenized into token files of its own.

A shard's name is a hash of everything from which its contents follow. So a finished shard of that name can always be
used, and a change gives another name. Shards do not depend on the number of workers.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import astuple, dataclass
from itertools import chain, islice
from pathlib import Path
from typing import Literal, NamedTuple

from megajax.config.base import InputError
from megajax.config.data import TokenizerConfig
from megajax.corpus.readers import Part, Record, TextDocuments, can_be_cut, optional, read_part, whole
from megajax.data.indexed import IndexedDataset, IndexedWriter, token_dtype
from megajax.data.tokenizers import Tokenizer, build_tokenizer
from megajax.files import atomic_write

_FORMAT = 1
"""Version of the shards, to be raised when the same input would give other ones."""
_MIN_SHARD, _MAX_SHARD, _SHARDS = 1 << 20, 128 << 20, 256
_BATCH_CHARACTERS = 1 << 18
Step = Callable[[int, int], None]
"""Callback for progress, which is told the bytes read and the documents made of them."""
_Row = tuple[Record, list[str | list[str]]]
_Documents = list[list[list[int]]]
"""Ids of the sequences of some documents."""


@dataclass(frozen=True)
class Options:
    """Choose how texts become documents."""

    keys: tuple[str, ...] = ("text",)
    """Keys of the records' texts; each key gives token files of its own, of the same documents."""
    append_eod: bool = True
    """Whether to end every document that has tokens with the end-of-document id."""
    split_sentences: bool = False
    """Whether the sequences of a document are its sentences.

    Each text of a list is a sequence in any case, as in Megatron-LM's preprocess_data.
    """
    text_documents: TextDocuments = "file"
    """Whether a document of a .txt file is the whole file or a line."""
    on_bad_line: Literal["error", "skip"] = "error"
    """Whether to stop at a line that is no usable record, or to leave it out and count it."""


@dataclass
class Counts:
    """The documents and tokens of the texts under one key."""

    documents: int = 0
    empty: int = 0
    skipped: int = 0
    tokens: int = 0
    unknown: int = 0

    def __add__(self, other: Counts) -> Counts:
        return Counts(*(a + b for a, b in zip(astuple(self), astuple(other), strict=True)))


class Shard(NamedTuple):
    """A part of the input, and the files that are made of it."""

    name: str
    parts: tuple[Part, ...]

    @property
    def size(self) -> int:
        """Return the size of the input in bytes."""
        return sum(part.end - part.start for part in self.parts)


@dataclass(frozen=True)
class Job:
    """The facts that all shards of a corpus share."""

    directory: Path
    tokenizer: TokenizerConfig
    options: Options

    def prefix(self, shard: Shard, key: int) -> Path:
        """Return the prefix of a shard's token files for the key of this number."""
        return self.directory / f"{shard.name}-{key}"

    def finished(self, shard: Shard) -> list[Counts] | None:
        """Return the counts of a shard, one per key, or None if it is missing or damaged."""
        try:
            counts = [Counts(*numbers) for numbers in json.loads((self.directory / f"{shard.name}.json").read_text())]
            for key in range(len(self.options.keys)):
                IndexedDataset(self.prefix(shard, key))
        except (FileNotFoundError, ValueError):
            return None
        return counts if self.options.on_bad_line == "skip" or not counts[0].skipped else None


def plan_shards(inputs: Sequence[str | Path], options: Options, tokenizer: Tokenizer) -> list[Shard]:
    """Divide the input into shards: large files are cut at line ends, and small ones are joined.

    Raises:
        InputError: a file is missing.
    """
    files = [whole(path) for path in inputs]
    limit = min(max(sum(file.end for file in files) // _SHARDS, _MIN_SHARD), _MAX_SHARD)
    groups: list[list[Part]] = [[]]
    room = limit
    for file in files:
        cut = can_be_cut(file.path, options.text_documents)
        for start in range(0, file.end or 1, limit) if cut else [0]:
            part = Part(file.path, start, min(start + limit, file.end) if cut else file.end)
            if part.end - part.start > room and groups[-1]:
                groups.append([])
                room = limit
            groups[-1].append(part)
            room -= part.end - part.start
    made_with = (_FORMAT, options.keys, options.append_eod, options.split_sentences, options.text_documents)
    tokenized_with = tokenizer.identity, tokenizer.eod_id, *tokenizer.prefix
    return [Shard(_content_key(made_with, tokenized_with, group), tuple(group)) for group in groups if group]


def _content_key(made_with: object, tokenized_with: object, parts: list[Part]) -> str:
    states = [(str(part.path.resolve()), part.path.stat(), part) for part in parts]
    sources = [(path, stat.st_size, stat.st_mtime_ns, part.start, part.end) for path, stat, part in states]
    return hashlib.sha256(json.dumps([made_with, tokenized_with, sources]).encode()).hexdigest()[:24]


def _characters(text: str | list[str]) -> int:
    return len(text) if isinstance(text, str) else sum(map(len, text))


class ShardWriter:
    """Make shards one after another."""

    def __init__(self, job: Job):
        self._job, self._options = job, job.options
        self._tokenizer = build_tokenizer(job.tokenizer)
        self._split = sentence_splitter() if job.options.split_sentences else lambda text: [text]
        self._skipped = 0

    def __call__(self, shard: Shard, step: Step) -> list[Counts]:
        """Write the token files of a shard, and then its counts, which mark it as finished.

        Raises:
            InputError: a file cannot be read, or a line is bad and bad lines are not skipped.
        """
        keys = range(len(self._options.keys))
        counts = [Counts() for _ in keys]
        self._skipped = 0
        dtype = token_dtype(self._tokenizer.vocab_size)
        with ExitStack() as stack:
            writers = [stack.enter_context(IndexedWriter(self._job.prefix(shard, key), dtype)) for key in keys]
            for batch, read in chain.from_iterable(map(self._batches, shard.parts)):
                for key, documents in enumerate(self._encode(batch)):
                    self._add(documents, writers[key], counts[key])
                step(read, len(batch))
        for count in counts:
            count.skipped = self._skipped
        with atomic_write(self._job.directory / f"{shard.name}.json") as file:
            file.write(json.dumps([astuple(count) for count in counts]).encode())
        return counts

    def _batches(self, part: Part) -> Iterator[tuple[list[_Row], int]]:
        """Iterate over batches of records, large enough to be encoded at once, with the bytes from which they were
        read.
        """
        batch: list[_Row] = []
        characters, begin = 0, part.start
        for record in read_part(part, self._options.keys, self._options.text_documents):
            try:
                texts = record.texts(self._options.keys, lists=True)
            except InputError as error:
                self._skip(record, error)
                continue
            batch.append((record, texts))
            characters += sum(map(_characters, texts))
            if characters >= _BATCH_CHARACTERS:
                yield batch, record.position - begin
                batch, characters, begin = [], 0, record.position
        yield batch, part.end - begin

    def _encode(self, batch: list[_Row]) -> list[_Documents]:
        """Return the ids of a batch's documents for every key."""
        keys = range(len(self._options.keys))
        try:
            return [self._encode_texts([texts[key] for _, texts in batch]) for key in keys]
        except InputError:  # the error does not name the record
            batch[:] = [row for row in batch if self._is_usable(*row)]
            return [self._encode_texts([texts[key] for _, texts in batch]) for key in keys]

    def _is_usable(self, record: Record, texts: list[str | list[str]]) -> bool:
        try:
            self._encode_texts(texts)
        except InputError as error:
            self._skip(record, error)
            return False
        return True

    def _encode_texts(self, texts: Sequence[str | list[str]]) -> _Documents:
        documents = [self._split(text) if isinstance(text, str) else text for text in texts]
        encoded = iter(self._tokenizer.encode_batch(list(chain.from_iterable(documents))))
        return [[ids for ids in islice(encoded, len(sentences)) if ids] for sentences in documents]

    def _add(self, documents: _Documents, writer: IndexedWriter, counts: Counts) -> None:
        for sequences in documents:
            if sequences and not self._options.split_sentences:
                sequences[0][:0] = self._tokenizer.prefix
            if sequences and self._options.append_eod:
                sequences[-1].append(self._tokenizer.eod_id)
            tokens = sequences[0] if len(sequences) == 1 else list(chain.from_iterable(sequences))
            writer.add_document(tokens, list(map(len, sequences)))
            counts.documents += 1
            counts.empty += not tokens
            counts.tokens += len(tokens)
            counts.unknown += tokens.count(self._tokenizer.unk_id) if self._tokenizer.unk_id is not None else 0

    def _skip(self, record: Record, error: InputError) -> None:
        if self._options.on_bad_line == "error":
            raise InputError(f"{record.where}: {error}; mend it or skip bad lines") from None
        self._skipped += 1


def sentence_splitter() -> Callable[[str], list[str]]:
    """Return a function that cuts an English text into sentences, without the white space between them.

    The rules are Punkt's (Kiss and Strunk 2006), as in Megatron-LM, with abbreviations learned from other text.

    Raises:
        InputError: nupunkt is not installed.
    """
    return optional("nupunkt", "splitting sentences").sentences
