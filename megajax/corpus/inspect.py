"""What is in a pair of token files, for people."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from megajax.data.indexed import IndexedDataset
from megajax.data.tokenizers import Tokenizer
from megajax.data.vocabulary import check_vocabulary

_SHOWN = 300
_QUANTILES = {"shortest": 0.0, "10 %": 0.1, "median": 0.5, "90 %": 0.9, "99 %": 0.99, "longest": 1.0}


def describe_token_files(prefix: str | Path, tokenizer: Tokenizer | None = None, documents: int = 3) -> str:
    """Return counts, token type and lengths of a pair, and its first documents with text, as ids or decoded.

    Args:
        prefix: of the pair.
        tokenizer: that the ids are from.
        documents: how many of them to show.

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
