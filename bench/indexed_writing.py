"""`python -m bench.indexed_writing`: writing token files, compared with megatron-core's builder.

megatron-core has to be installed. Both write the same documents as 16-bit ids, one call a document; the files are
compared. They take turns, and the best time counts. Tokenizers return lists; other tools pass arrays.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from megajax.data.indexed import IndexedWriter

TOKENS = 10_000_000


def main(argv: Sequence[str] | None = None) -> int:
    """Print one table; 1 if a target is missed."""
    parser = argparse.ArgumentParser(prog="python -m bench.indexed_writing")
    parser.add_argument("--lengths", type=int, nargs="+", default=[300, 1000], help="tokens per document")
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args(argv)
    print("tokens/document  ids       Megatron M/s  ours M/s  ratio (target: 2)")
    failed = False
    for length in args.lengths:
        ids = np.random.default_rng(0).integers(0, 50_000, (TOKENS // length, length), np.int32)
        for kind, documents in {"list": ids.tolist(), "int32": list(ids)}.items():
            theirs, ours = compare(documents, args.rounds)
            speeds = f"{ids.size / theirs / 1e6:13.0f} {ids.size / ours / 1e6:9.0f}"
            print(f"{length:15d}  {kind:8s} {speeds} {theirs / ours:6.2f}")
            failed |= theirs / ours < 2
    return int(failed)


def compare(documents: Sequence[Any], rounds: int) -> tuple[float, float]:
    """Return the best seconds of both, having compared what they wrote."""
    with tempfile.TemporaryDirectory() as directory:
        prefixes = [Path(directory) / name for name in ("theirs", "ours")]
        writers = list(zip((megatron, megajax), prefixes, strict=True))
        seconds = [[timed(write, documents, prefix) for write, prefix in writers] for _ in range(rounds)]
        for suffix in ("bin", "idx"):
            theirs, ours = (Path(f"{prefix}.{suffix}").read_bytes() for prefix in prefixes)
            assert theirs == ours
    return min(theirs for theirs, _ in seconds), min(ours for _, ours in seconds)


def timed(write: Callable[[Sequence[Any], Path], None], documents: Sequence[Any], prefix: Path) -> float:
    """Return the seconds of one call."""
    start = time.perf_counter()
    write(documents, prefix)
    return time.perf_counter() - start


def megatron(documents: Sequence[Any], prefix: Path) -> None:
    """Write as Megatron-LM preprocess_data does."""
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=np.uint16)
    for document in documents:
        builder.add_document(document, [len(document)])
    builder.finalize(f"{prefix}.idx")


def megajax(documents: Sequence[Any], prefix: Path) -> None:
    """Write the same."""
    with IndexedWriter(prefix, np.dtype(np.uint16)) as writer:
        for document in documents:
            writer.add_document(document)


if __name__ == "__main__":
    sys.exit(main())
