"""Several pairs of token files as one, in memory that does not grow with them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from megajax.config.base import InputError
from megajax.data.indexed import IndexedDataset, map_index, new_pair, write_index
from megajax.data.vocabulary import IdRange

_PIECE = 1 << 22
"""Tokens copied at a time."""


def prefixes_in(source: str | Path) -> list[Path]:
    """Return the token files of a folder by name, as Megatron-LM merge_datasets takes them, or the prefix itself.

    Raises:
        InputError: there are none in the folder.
    """
    if not Path(source).is_dir():
        return [Path(source)]
    prefixes = sorted(path.with_suffix("") for path in Path(source).glob("*.idx"))
    if not prefixes:
        raise InputError(f"{source}: no token files (.idx and .bin) in this folder")
    return prefixes


def merge_token_files(prefixes: Sequence[str | Path], output_prefix: str | Path) -> None:
    """Write the documents of some pairs, one pair after the other, as one pair (Megatron-LM merge_datasets).

    Raises:
        InputError: a pair cannot be read, or its token type is not that of the first.
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
