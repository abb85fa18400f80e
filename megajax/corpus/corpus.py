"""Text to Megatron token files, with the same bytes on any number of processes and after any interruption.

The input is divided into shards (`shards.py`), which lie in `{output_prefix}_shards` until all are finished and are
then merged in order; so the disk needs room for the tokens twice. The same command continues after an interruption.
"""

from __future__ import annotations

import logging
import re
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import astuple, dataclass
from itertools import islice
from pathlib import Path
from typing import Literal

from megajax.config.base import InputError
from megajax.config.data import TokenizerConfig
from megajax.corpus.readers import read_part, whole
from megajax.corpus.shards import Counts, Job, Options, Shard, plan_shards
from megajax.corpus.token_files import merge_token_files
from megajax.corpus.workers import make_shards
from megajax.data.tokenizers import Tokenizer, build_tokenizer
from megajax.files import held_alone
from megajax.observe.progress import InputProgress

log = logging.getLogger(__name__)

_LOCK = "lock"
_LOOK = 100
"""Number of texts that are searched for spaces that a tokenizer loses."""
_OURS = re.compile(r"lock|\.?[0-9a-f]{24}(-\d+)?\.(bin|idx|ids\.json|json)(\.[0-9a-f]{32})?")
"""Names that a folder of shards may hold; anything else in it belongs to somebody else."""


@dataclass(frozen=True)
class Report:
    """The counts of a tokenized corpus."""

    prefix: str
    """Prefix of the token files that were written, for `data.path`."""
    documents: int
    """Number of records that were read, empty ones included."""
    empty: int
    """Number of records without a token, which become documents without sequences."""
    skipped: int
    """Number of lines left out because they hold no usable record."""
    tokens: int
    """Number of tokens written, end-of-document ids included."""
    unknown: int
    """Number of tokens that stand for text for which the tokenizer has no piece."""

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
    split_sentences: bool = False,
    workers: int = 1,
) -> Report:
    """Tokenize the texts under one key (see `preprocess_keys` and `Options`)."""
    options = Options((key,), append_eod, split_sentences, on_bad_line=on_bad_line)
    return preprocess_keys(inputs, output_prefix, tokenizer, options, workers)[0]


def preprocess_keys(
    inputs: Sequence[str | Path],
    output_prefix: str | Path,
    tokenizer: TokenizerConfig,
    options: Options,
    workers: int = 1,
) -> list[Report]:
    """Tokenize files into `{output_prefix}_{key}_document.bin` and `.idx` (Megatron-LM preprocess_data).

    With sentences as sequences, the files end in `_sentence` instead of `_document`. A record that is bad for one key
    is left out for all keys, so that a record's documents have the same number everywhere.

    Args:
        inputs: files as `readers.py` reads them; documents keep their order.
        output_prefix: prefix of the token files.
        tokenizer: tokenizer of the texts.
        options: choices of how texts become documents.
        workers: number of processes; a packed or Parquet file is read by one.

    Raises:
        InputError: a file or line cannot be used, there are no documents, or a file cannot be written; no token file is
            left behind then, except for finished shards.
    """
    job = Job(Path(f"{output_prefix}_shards"), tokenizer, options)
    built = build_tokenizer(tokenizer)
    shards = plan_shards(inputs, options, built)
    if not options.split_sentences:
        warn_of_losses(built, _first_texts(inputs, options))
    level = "sentence" if options.split_sentences else "document"
    with _working_directory(job, shards):
        _make_missing_shards(job, shards, workers)
        reports = []
        for number, key in enumerate(options.keys):
            counts = sum((_counts(job, shard)[number] for shard in shards), Counts())
            reports.append(Report(f"{output_prefix}_{key}_{level}", *astuple(counts)))
        _check_reports(reports, inputs, options)
        for number, report in enumerate(reports):
            merge_token_files([job.prefix(shard, number) for shard in shards], report.prefix)
    return reports


def _first_texts(inputs: Sequence[str | Path], options: Options) -> Iterator[str]:
    """Iterate over texts at the beginning of the first file; bad lines are passed over, as tokenizing reports them."""
    with suppress(InputError):
        for record in read_part(whole(inputs[0]), options.keys, options.text_documents):
            with suppress(InputError):
                yield from (text for text in record.texts(options.keys) if isinstance(text, str))


def warn_of_losses(tokenizer: Tokenizer, texts: Iterator[str]) -> None:
    """Warn if a tokenizer reads other kinds of spaces as single ones, and tell how many of some texts hold any.

    Args:
        tokenizer: tokenizer that reads the texts.
        texts: texts, of which the first ones are searched.
    """
    lost = tokenizer.lost_spaces()
    if lost:
        some = list(islice(texts, _LOOK))
        count = sum(any(spaces in text for spaces in lost.values()) for text in some)
        log.log(
            logging.WARNING if count else logging.INFO,
            "the tokenizer reads %s as single spaces: %d of the first %d texts lose some; "
            "what is trained on them cannot write such spaces either",
            ", ".join(lost), count, len(some),
        )  # fmt: skip


def _make_missing_shards(job: Job, shards: Sequence[Shard], workers: int) -> None:
    missing = [shard for shard in dict.fromkeys(shards) if job.finished(shard) is None]
    total, left = (sum(shard.size for shard in some) for some in (dict.fromkeys(shards), missing))
    if left < total:
        log.info("%s: continuing, %.0f%% is there already", job.directory, 100 - 100 * left / total)
    with InputProgress(total, done=total - left) as progress:
        make_shards(job, missing, workers, progress.advance)


def _counts(job: Job, shard: Shard) -> list[Counts]:
    counts = job.finished(shard)
    if counts is None:
        raise InputError(f"{job.directory}: {shard.name} is damaged; run again")
    return counts


def _check_reports(reports: Sequence[Report], inputs: Sequence[str | Path], options: Options) -> None:
    for report, key in zip(reports, options.keys, strict=True):
        if report.tokens == 0:
            files = ", ".join(map(str, inputs))
            raise InputError(
                f"{files}: no documents with text ({report.documents} empty, {report.skipped} lines skipped); "
                f'give lines such as {{"{key}": "..."}}'
            )
        if report.unknown:
            log.warning(
                "%s: %d of %d tokens are unknown to the tokenizer: their text is lost",
                report.prefix, report.unknown, report.tokens,
            )  # fmt: skip


@contextmanager
def _working_directory(job: Job, shards: Sequence[Shard]) -> Iterator[None]:
    """Hold the folder of the shards during the block, and remove it at the end, or after an error if no shard is
    finished.
    """
    keep = True
    try:
        job.directory.mkdir(parents=True, exist_ok=True)
        for path in job.directory.iterdir():
            if not _OURS.fullmatch(path.name):
                raise InputError(
                    f"{job.directory} is for unfinished shards and holds {path.name}: choose another --output-prefix"
                )
        busy = InputError(f"{job.directory}: another process is at work there; wait for it to end")
        with held_alone(job.directory / _LOCK, busy):
            try:
                _tidy(job, shards)
                yield
                keep = False
            finally:
                keep = keep and _tidy(job, shards)
    except OSError as error:
        where = error.filename or job.directory
        raise InputError(f"{where}: {error.strerror}; make room or check the path and run again") from error
    finally:
        if not keep:
            shutil.rmtree(job.directory)


def _tidy(job: Job, shards: Sequence[Shard]) -> bool:
    """Remove files of unfinished shards and of other jobs; return whether any tokens are left."""
    finished = {shard.name: counts for shard in shards if (counts := job.finished(shard)) is not None}
    for path in job.directory.iterdir():
        if path.name != _LOCK and re.split("[-.]", path.name)[0] not in finished:
            path.unlink()
    return any(count.tokens for counts in finished.values() for count in counts)
