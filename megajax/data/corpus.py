"""JSON Lines to Megatron token files, on one or more processes."""

from __future__ import annotations

import logging
import multiprocessing
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Literal

import numpy as np

from megajax.config.base import ConfigError
from megajax.config.data import TokenizerConfig
from megajax.data.indexed import IndexedWriter, token_dtype
from megajax.data.jsonl import Line, parse_document, read_lines
from megajax.data.tokenizers import build_tokenizer

log = logging.getLogger(__name__)

_CHUNK = 64


@dataclass(frozen=True)
class Report:
    """What became of a corpus."""

    prefix: str
    """Of the token files written, for `data.path`."""
    documents: int
    """Records read, the empty ones included."""
    empty: int
    """Of them, records without a token: they become documents without sequences."""
    skipped: int
    """Lines left out because they hold no usable record."""
    tokens: int
    """Tokens written, end-of-document ids included."""
    unknown: int
    """Of them, ids that stand for text the tokenizer has no piece for."""

    def __str__(self) -> str:
        return (
            f"{self.prefix}: {self.documents:,} documents ({self.empty:,} empty), {self.tokens:,} tokens "
            f"({self.unknown:,} unknown), {self.skipped:,} lines skipped"
        )


def preprocess(
    inputs: Sequence[str | Path],
    output_prefix: str | Path,
    tokenizer: TokenizerConfig,
    key: str = "text",
    *,
    append_eod: bool = True,
    on_bad_line: Literal["error", "skip"] = "error",
    workers: int = 1,
) -> Report:
    """Tokenize JSON Lines files into `{output_prefix}_{key}_document.bin` and `.idx` (Megatron-LM preprocess_data).

    Documents keep their order, whatever the number of workers.

    Args:
        inputs: .jsonl or .jsonl.gz files.
        output_prefix: of the token files.
        tokenizer: what turns text into ids.
        key: of the records, under which the text stands.
        append_eod: end every document that has tokens with the end-of-document id.
        on_bad_line: stop at a line that is no usable record, or leave it out and count it.
        workers: processes.

    Raises:
        ConfigError: a file or line cannot be used, or there are no documents; no token file is left behind then.
    """
    built = build_tokenizer(tokenizer)
    prefix = f"{output_prefix}_{key}_document"
    documents = empty = skipped = tokens = unknown = 0
    lines = read_lines(inputs)
    with IndexedWriter(prefix, token_dtype(built.vocab_size)) as writer:
        for encoded in _encode_all(lines, (tokenizer, key, append_eod), workers):
            if isinstance(encoded, ConfigError):
                if on_bad_line == "error":
                    raise ConfigError(f"{encoded}; mend it or skip bad lines")
                skipped += 1
                continue
            writer.add_document(encoded)
            documents += 1
            empty += not encoded.size
            tokens += encoded.size
            unknown += int(np.count_nonzero(encoded == built.unk_id))
        if tokens == 0:
            files = ", ".join(map(str, inputs))
            raise ConfigError(
                f"{files}: no documents with text ({documents} empty, {skipped} lines skipped); "
                f'give lines such as {{"{key}": "..."}}'
            )
    if unknown:
        log.warning("%s: %d of %d tokens are unknown to the tokenizer: their text is lost", prefix, unknown, tokens)
    return Report(prefix, documents, empty, skipped, tokens, unknown)


class _Encoder:
    """Turns lines into ids, or into what is wrong with them."""

    def __init__(self, tokenizer: TokenizerConfig, key: str, append_eod: bool):
        self._tokenizer, self._key, self._append_eod = build_tokenizer(tokenizer), key, append_eod

    def __call__(self, line: Line) -> np.ndarray | ConfigError:
        try:
            ids = self._tokenizer.encode(parse_document(line, self._key))
        except ConfigError as error:
            return ConfigError(f"{line.where}: {error}")
        if ids and self._append_eod:
            ids.append(self._tokenizer.eod_id)
        return np.array(ids, np.int32)


_Settings = tuple[TokenizerConfig, str, bool]
_encoder: _Encoder
"""The encoder of a worker process: tokenizers are built once in each, not sent along with every line."""


def _start_worker(*settings: *_Settings) -> None:
    global _encoder  # noqa: PLW0603
    _encoder = _Encoder(*settings)


def _encode_chunk(lines: Sequence[Line]) -> list[np.ndarray | ConfigError]:
    return [_encoder(line) for line in lines]


def _encode_all(lines: Iterator[Line], settings: _Settings, workers: int) -> Iterator[np.ndarray | ConfigError]:
    """Encode lines in order, with a bounded number of them in flight."""
    if workers == 1:
        yield from map(_Encoder(*settings), lines)
        return
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(workers, spawn, _start_worker, settings) as pool:
        pending: deque[Future[list[np.ndarray | ConfigError]]] = deque()
        while chunk := list(islice(lines, _CHUNK)):
            pending.append(pool.submit(_encode_chunk, chunk))
            if len(pending) > 2 * workers:
                yield from pending.popleft().result()
        for future in pending:
            yield from future.result()
