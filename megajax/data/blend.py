"""Blends: several sources mixed into one stream of samples, in given proportions.

The order equals Megatron-LM's BlendedDataset: sample i comes from the source that is furthest behind its share.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from megajax.config.base import InputError
from megajax.config.run_files import as_number
from megajax.data.cache import fingerprint, load_or_build
from megajax.data.dataset import Batch, Dataset, gather_rows

_SURPLUS = 1.005
_BLOCK = 1 << 20


class Source(NamedTuple):
    """One entry of a data path."""

    prefix: str
    weight: float | None
    """Share of the samples, relative to the other sources; None = sources are used whole."""


def parse_data_path(words: Sequence[str]) -> list[Source]:
    """Parse `[prefix]`, `[prefix, prefix, ...]` or `[weight, prefix, weight, prefix, ...]`.

    Raises:
        InputError: weights and prefixes do not pair up, or a weight is not a positive finite number.
    """
    if len(words) == 1:
        return [Source(words[0], None)]
    numbers = [as_number(word) for word in words]
    if all(number is None for number in numbers):
        return [Source(prefix, None) for prefix in words]
    weights, prefixes = [number for number in numbers[0::2] if number is not None], words[1::2]
    if len(words) % 2 or len(weights) != len(prefixes):
        found = [word for word, number in zip(words, numbers, strict=True) if number is not None]
        raise InputError(
            f"data path: {len(found)} weights ({', '.join(found)}) for {len(words) - len(found)} prefixes; "
            "write weight prefix weight prefix ..., or prefixes only"
        )
    for word, weight, prefix in zip(words[0::2], weights, prefixes, strict=True):
        if not 0 < weight < math.inf:
            raise InputError(
                f"data path: weight {word} of {prefix} is not a positive finite number; leave out unused sources"
            )
    return [Source(prefix, weight) for weight, prefix in zip(weights, prefixes, strict=True)]


def source_sizes(weights: Sequence[float], num_samples: int) -> tuple[list[int], list[int]]:
    """Return the number of samples that each source gives, and the number to build, which is 0.5 % more as in Megatron.

    The surplus covers the greedy order, which may run slightly ahead of a source's share.
    """
    given = [math.ceil(num_samples * share) for share in _shares(weights)]
    return given, [math.ceil(count * _SURPLUS) for count in given]


def _shares(weights: Sequence[float]) -> np.ndarray:
    return np.array(weights, np.float64) / (np.sum(weights, dtype=np.float64) or 1.0)  # all 0: nothing is left to draw


def blend_order(weights: Sequence[float], length: int) -> tuple[np.ndarray, np.ndarray]:
    """Choose a source for each of `length` samples.

    Draw i goes to the source with the largest `share * max(i, 1) - samples given so far`, and on a tie to the first
    one. If the weights are the sizes of the sources and the length is their sum, every source is used up exactly: a
    source that has given all its samples is no longer behind, while another one is. A draw takes 1 to 2 microseconds.

    Returns:
        The source of each draw, int16 [length], and the number of the sample within that source, int64 [length].
    """
    shares = _shares(weights)
    counts = np.where(shares > 0, 0.0, np.inf)  # a source that has nothing left is never drawn
    dataset_index = np.empty(length, np.int16)
    sample_index = np.empty(length, np.int64)
    for start in range(0, length, 1024):
        steps = np.arange(start, min(start + 1024, length))
        for i, due in enumerate(np.maximum(steps, 1)[:, None] * shares, start):
            k = (due - counts).argmax()
            dataset_index[i], sample_index[i] = k, counts[k]
            counts[k] += 1
    return dataset_index, sample_index


class BlendedDataset:
    """Mix several datasets into one.

    Args:
        datasets: datasets of the sources.
        weights: relative shares of the samples.
        length: number of samples in the mix.
        cache_dir: folder in which the order is kept.
        start: number of the first sample of the mix; earlier ones belong to another mix.
        first: first sample that is read of each source; unset = its beginning.

    Raises:
        InputError: a source is asked for more samples than it has.
    """

    def __init__(
        self,
        datasets: Sequence[Dataset],
        weights: Sequence[float],
        length: int,
        cache_dir: Path | None,
        start: int = 0,
        first: Sequence[int] | None = None,
    ):
        if len(datasets) > np.iinfo(np.int16).max:
            raise InputError(f"data path: {len(datasets)} sources; a blend holds at most {np.iinfo(np.int16).max}")
        self.datasets, self._start, self._length = datasets, start, length
        self._first = np.array(first or [0] * len(datasets))
        if len(datasets) > 1:  # of a single source draw i is sample i
            self.dataset_index, self.dataset_sample_index = load_or_build(
                cache_dir,
                fingerprint("BlendedDataset", list(weights), length),
                ("dataset_index", "dataset_sample_index"),
                lambda: blend_order(weights, length),
            )
        for k, asked in enumerate(self.consumed(len(self))):
            if asked > len(datasets[k]):
                raise InputError(
                    f"data path: source {k + 1} with weight {weights[k]} is asked for {asked} samples and has "
                    f"{len(datasets[k])}; bring the weights closer together"
                )

    def __len__(self) -> int:
        return self._start + self._length

    def consumed(self, samples: int) -> list[int]:
        """Return the number of samples read from each source after `samples` (at least `start`) samples of the run."""
        draws = min(samples, len(self)) - self._start
        counts = self._first.copy()
        if len(self.datasets) == 1:
            return (counts + draws).tolist()
        for block in range(0, draws, _BLOCK):  # counting needs a copy of 64-bit numbers
            counts += np.bincount(self.dataset_index[block : min(block + _BLOCK, draws)], minlength=len(counts))
        return counts.tolist()

    def batch(self, sample_ids: np.ndarray) -> Batch:
        """Return the rows of these samples, gathered source by source."""
        inside = sample_ids < len(self)
        draws = np.where(inside, sample_ids - self._start, 0)
        sources, numbers = np.zeros_like(draws), draws
        if len(self.datasets) > 1:
            sources, numbers = self.dataset_index[draws], self.dataset_sample_index[draws]
        past_the_end = len(self.datasets[0])
        numbers = np.where(inside, self._first[sources] + numbers, past_the_end)
        return gather_rows(self.datasets, np.where(inside, sources, 0), numbers, sample_ids)
