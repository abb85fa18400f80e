"""Batches in training order, read ahead in threads; the whole state is how many samples were consumed.

Global batch i of a run is a slice of consecutive sample numbers, whatever the layout: each process reads the rows it
needs of it, and a run resumes under any number of processes or batch size from the sample count alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Self

import grain
import numpy as np

from megajax.config.base import ConfigError
from megajax.config.data import DataConfig
from megajax.data.batch import Batch, make_batch
from megajax.data.gpt import Dataset


class Loader:
    """A sequence of (samples consumed before, batch) from `consumed_samples` to the last full global batch.

    Args:
        dataset: where samples come from.
        config: how batches are made of them, and how many to read ahead.
        eod: end-of-document id.
        batch_size_at: global batch size after so many consumed samples (it may ramp up).
        consumed_samples: where to start.
        rows: positions within a global batch of a given size that this process needs.
    """

    def __init__(
        self,
        dataset: Dataset,
        config: DataConfig,
        eod: int,
        batch_size_at: Callable[[int], int],
        consumed_samples: int = 0,
        rows: Callable[[int], np.ndarray] = np.arange,
    ):
        self._dataset, self._config, self._eod, self._rows = dataset, config, eod, rows
        self._edges = [consumed_samples]
        while (edge := self._edges[-1] + batch_size_at(self._edges[-1])) <= len(dataset):
            self._edges.append(edge)

    def __len__(self) -> int:
        """Return the number of full global batches left; an incomplete last one is never served."""
        return len(self._edges) - 1

    def first(self, batches: int) -> Self:
        """Stop after so many batches.

        Raises:
            ConfigError: there are fewer.
        """
        if batches > len(self):
            missing = f"{len(self)} batches are left in the training data, {batches} are needed"
            raise ConfigError(f"{missing}: name more data, or lower train.steps")
        self._edges = self._edges[: batches + 1]
        return self

    def __getitem__(self, i: int) -> tuple[int, Batch]:
        """Read batch `i` from the start of this loader."""
        consumed, end = self._edges[i : i + 2]
        sample_ids = consumed + self._rows(end - consumed)
        samples = [self._dataset[sample] for sample in sample_ids.tolist()]
        return consumed, make_batch(samples, sample_ids, self._config, self._eod)

    def __iter__(self) -> Iterator[tuple[int, Batch]]:
        """Iterate with read-ahead; an error while reading surfaces at the batch that it concerns."""
        if self._config.prefetch == 0:
            return (self[i] for i in range(len(self)))
        ahead = grain.ReadOptions(num_threads=self._config.prefetch, prefetch_buffer_size=self._config.prefetch)
        return iter(grain.MapDataset.source(self).to_iter_dataset(ahead))
