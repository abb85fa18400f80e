"""`python -m bench.index_building`: seconds to build the sample order, beside megatron-core's compiled helper.

Documents of 1 to 599 tokens are cut into samples of 2,048 and shuffled over 1 and 4 epochs. If megatron-core is
installed (it is not a dependency: use an environment of its own), both build the same order in turns, and must agree on
every number. Both run on one core, and only this process's own seconds count.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from megajax.data.gpt import build_sample_order

SEQUENCE, LONGEST, SEED = 2048, 600, 1234
CASES = ((1_000_000, 1), (1_000_000, 4), (10_000_000, 1), (10_000_000, 4))
Build = Callable[[], Sequence[np.ndarray]]


def main(argv: Sequence[str] | None = None) -> int:
    """Print a table; 1 if the orders differ."""
    parser = argparse.ArgumentParser(prog="python -m bench.index_building")
    parser.add_argument("--rounds", type=int, default=3, help="the quickest of so many counts")
    rounds = parser.parse_args(argv).rounds
    print(f"{'documents':>11}{'epochs':>7}{'megajax s':>11}{'megatron s':>11}{'ratio':>7}  equal")
    differ = 0
    for documents, epochs in CASES:
        ours, theirs, equal = compare(*builds_of(documents, epochs), rounds)
        differ |= equal is False
        ratio = f"{theirs / ours:.2f}" if theirs else "-"
        same = "-" if equal is None else equal
        print(f"{documents:>11,}{epochs:>7}{ours:>11.3f}{theirs or np.nan:>11.3f}{ratio:>7}  {same}", flush=True)
    return int(differ)


def builds_of(documents: int, epochs: int) -> tuple[Build, Build | None]:
    """Our build and, where it is installed, megatron-core's."""
    lengths = np.random.default_rng(0).integers(1, LONGEST, documents, np.int32)
    indices = np.arange(documents, dtype=np.int32)
    tokens = int(lengths.sum(dtype=np.int64))
    samples = None if epochs == 1 else (epochs * tokens - 1) // SEQUENCE  # the last epoch is used up: not kept apart

    def ours() -> Sequence[np.ndarray]:
        return build_sample_order(lengths, indices, samples, SEQUENCE, SEED)

    if importlib.util.find_spec("megatron") is None:
        return ours, None
    from megatron.core.datasets import gpt_dataset, helpers

    def theirs() -> Sequence[np.ndarray]:
        rng: Any = np.random.RandomState(SEED)
        document_index = gpt_dataset._build_document_index(indices, epochs, rng, False)
        sample_index = helpers.build_sample_idx(lengths, document_index, SEQUENCE, epochs, tokens)
        count = len(sample_index) - 1
        return document_index, sample_index, gpt_dataset._build_shuffle_index(count, count, rng)

    return ours, theirs


def compare(ours: Build, theirs: Build | None, rounds: int) -> tuple[float, float | None, bool | None]:
    """Least seconds of both, taking turns, and whether they built the same; None where there is nothing to compare."""
    seconds, built = [], []
    for _ in range(rounds):
        lap = [time.process_time()]
        built = []
        for build in filter(None, (ours, theirs)):
            built.append(build())
            lap.append(time.process_time())
        seconds.append(np.diff(lap))
    least = np.min(seconds, axis=0).tolist()
    if theirs is None:
        return least[0], None, None
    equal = all(np.array_equal(a, b) for a, b in zip(built[0], built[-1], strict=True))
    return least[0], least[1], equal


if __name__ == "__main__":
    sys.exit(main())
