"""Merging pairs of token files, in memory that does not grow with them, and describing them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from megajax.config.base import InputError
from megajax.data.indexed import IndexedDataset, map_index, new_pair, write_index
from megajax.data.tokenizers import Tokenizer
from megajax.data.vocabulary import IdRange, check_vocabulary

_PIECE = 1 << 22
"""Number of tokens copied at a time."""
_SHOWN = 300
_QUANTILES = {"shortest": 0.0, "10 %": 0.1, "median": 0.5, "90 %": 0.9, "99 %": 0.99, "longest": 1.0}


def prefixes_in(source: str | Path) -> list[Path]:
    """Return the token files of a folder by name, as Megatron-LM merge_datasets does, or the prefix itself.

    Raises:
        InputError: the folder holds no token files.
    """
    if not Path(source).is_dir():
        return [Path(source)]
    prefixes = sorted(path.with_suffix("") for path in Path(source).glob("*.idx"))
    if not prefixes:
        raise InputError(f"{source}: no token files (.idx and .bin) in this folder")
    return prefixes


def merge_token_files(prefixes: Sequence[str | Path], output_prefix: str | Path) -> None:
    """Merge pairs of token files into one pair, in their order (Megatron-LM merge_datasets).

    Raises:
        InputError: a pair cannot be read, or its token type differs from that of the first.
    """
    for prefix in prefixes:
        dtypes = [IndexedDataset(p).dtype for p in (prefixes[0], prefix)]
        if dtypes[0] != dtypes[1]:
            raise InputError(
                f"{prefix}: holds {dtypes[1].name} tokens, {prefixes[0]} {dtypes[0].name}; "
                "only files of one token type can be merged: write one of them again"
            )
    ids = IdRange()
    with new_pair(output_prefix) as (tokens, index):
        for prefix in prefixes:
            part = IndexedDataset(prefix)
            for start in range(0, part.total, _PIECE):
                piece = part.span(start, start + _PIECE)
                ids.add(piece)
                tokens.write(piece.data)
        write_index(index, lambda: (map_index(Path(f"{prefix}.idx")) for prefix in prefixes))
    ids.note(IndexedDataset(output_prefix))


def describe_token_files(prefix: str | Path, tokenizer: Tokenizer | None = None, documents: int = 3) -> str:
    """Return counts, token type and lengths of a pair, and its first documents as ids or decoded text.

    Args:
        prefix: prefix of the pair.
        tokenizer: tokenizer of the ids; None to show ids.
        documents: number of documents to show.

    Raises:
        InputError: the pair cannot be read, or holds an id that the tokenizer lacks.
    """
    indexed = IndexedDataset(prefix)
    starts = np.append(indexed.pointers // indexed.dtype.itemsize, indexed.lengths.sum(dtype=np.int64))
    tokens = np.diff(starts[indexed.document_index])  # per document
    counts = f"{len(tokens):,} ({int((tokens == 0).sum()):,} empty), {len(indexed):,} sequences, {starts[-1]:,} tokens"
    lines = [
        f"{prefix}: {indexed.dtype.name} tokens, {indexed.bin_path.stat().st_size:,} bytes",
        f"documents  {counts}",
    ]
    for what, lengths in {"document": tokens, "sequence": indexed.lengths}.items():
        if len(lengths):
            values = np.quantile(lengths, list(_QUANTILES.values()), method="nearest")
            quantiles = ", ".join(f"{name} {value:,}" for name, value in zip(_QUANTILES, values, strict=True))
            lines.append(f"tokens per {what}: mean {lengths.mean():,.1f}, {quantiles}")
    for number in np.flatnonzero(tokens)[:documents]:
        first, end = indexed.document_index[number : number + 2]
        lines.append(f"document {number}:")
        for sequence in range(first, end):
            ids = indexed.get(sequence, length=_SHOWN)
            if tokenizer is not None:
                check_vocabulary(ids, tokenizer.vocab_size, indexed.bin_path)
            lines.append(f"    {_show(ids, tokenizer)}")
    return "\n".join(lines)


def _show(ids: np.ndarray, tokenizer: Tokenizer | None) -> str:
    text = " ".join(map(str, ids)) if tokenizer is None else repr(tokenizer.decode(ids.tolist()))
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]} ..."
