"""`python -m bench.loader_speed`: samples of 2,048 tokens read per second, compared with megatron-core's GPTDataset.

One process, whose own seconds count, reads a file of documents of 1 to 1,199 tokens in shuffled order. Megatron-core,
if installed (it is not a dependency: use an environment of its own), returns one sample a call, and ours a batch. Both
must return the same tokens.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from megajax.config import DataConfig
from megajax.data.gpt import GPTDataset
from megajax.data.indexed import IndexedDataset, IndexedWriter, Selection
from megajax.data.tokenizers import NullTokenizer

SEQUENCE, LONGEST, SEED, VOCABULARY = 2048, 1200, 1234, 50_000
BATCHES = (1, 8, 64)
Read = Callable[[int, int], Sequence[np.ndarray]]
"""First sample and number of them -> their tokens."""


def main(argv: Sequence[str] | None = None) -> int:
    """Print a table; 1 if the tokens differ."""
    parser = argparse.ArgumentParser(prog="python -m bench.loader_speed")
    parser.add_argument("--documents", type=int, default=200_000)
    parser.add_argument("--samples", type=int, default=8192, help="read in each round")
    parser.add_argument("--rounds", type=int, default=5, help="the quickest of so many counts")
    args = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as folder:
        readers = readers_of(Path(folder), args.documents)
        seconds = time_reading(readers, args.samples, args.rounds)
        tokens = [np.concatenate(read(0, 64)) for read in readers.values()]
    slowest = args.samples / seconds.get("megatron-core", float("nan"))
    print(f"{'':<22}{'samples/s':>11}{'M tokens/s':>12}{'x megatron':>12}")
    for name, took in seconds.items():
        rate = args.samples / took
        print(f"{name:<22}{rate:>11,.0f}{rate * SEQUENCE / 1e6:>12,.0f}{rate / slowest:>12.1f}")
    return int(not all(np.array_equal(tokens[0], other) for other in tokens))


def readers_of(folder: Path, documents: int) -> dict[str, Read]:
    """Our dataset with several batch sizes and, where it is installed, megatron-core's."""
    rng = np.random.default_rng(0)
    with IndexedWriter(folder / "corpus", np.dtype("<u2")) as writer:
        for length in rng.integers(1, LONGEST, documents).tolist():
            writer.add_document(rng.integers(1, VOCABULARY, length).astype(np.uint16))
    indices = np.arange(documents, dtype=np.int32)
    indexed, tokenizer = IndexedDataset(folder / "corpus"), NullTokenizer(VOCABULARY)
    data = GPTDataset(
        Selection(indexed, indices, None, SEED, "train", None), DataConfig(seq_length=SEQUENCE), tokenizer
    )

    def by(size: int) -> Read:
        return lambda first, count: [
            data.batch(np.arange(i, min(i + size, first + count)))["tokens"] for i in range(first, first + count, size)
        ]

    readers = {f"megajax, batch {size}": by(size) for size in BATCHES}
    return readers | _megatron(folder, indices)


def _megatron(folder: Path, indices: np.ndarray) -> dict[str, Read]:
    if importlib.util.find_spec("megatron") is None:
        return {}
    warnings.simplefilter("ignore")
    from megatron.core.datasets import gpt_dataset, indexed_dataset, utils

    class Tokenizer:
        eod, pad, vocab_size = VOCABULARY, -1, VOCABULARY + 1
        unique_identifiers: dict[str, Any] = {}  # noqa: RUF012

    config = gpt_dataset.GPTDatasetConfig(
        random_seed=SEED, sequence_length=SEQUENCE, split="1,0,0", path_to_cache=str(folder / "cache"),
        reset_position_ids=False, reset_attention_mask=False, eod_mask_loss=False, create_attention_mask=False,
        tokenizer=Tokenizer(),
    )  # fmt: skip
    prefix = str(folder / "corpus")
    file = indexed_dataset.IndexedDataset(prefix)
    data = gpt_dataset.GPTDataset(file, prefix, indices, None, utils.Split.train, config)
    return {
        "megatron-core": lambda first, count: [data[i]["tokens"].numpy()[None] for i in range(first, first + count)]
    }


def time_reading(readers: dict[str, Read], samples: int, rounds: int) -> dict[str, float]:
    """Least seconds of each, taking turns; each round reads other samples than the one before."""
    seconds: dict[str, list[float]] = {name: [] for name in readers}
    for number in range(rounds):
        for name, read in readers.items():
            start = time.process_time()
            read(number * samples, samples)
            seconds[name].append(time.process_time() - start)
    return {name: min(laps) for name, laps in seconds.items()}


if __name__ == "__main__":
    sys.exit(main())
