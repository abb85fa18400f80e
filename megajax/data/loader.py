"""Loader of batches in training order, read ahead in threads; its whole state is the number of consumed samples.

Global batch i of a run is a slice of consecutive sample numbers, whatever the layout. Each process reads the rows of it
that it needs, and a run resumes from the sample count alone, under any number of processes and batch size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import grain
import numpy as np

from megajax.config.base import InputError
from megajax.data.dataset import Batch, Dataset


class Loader:
    """Provide a sequence of (samples consumed before, batch): `batches` full global batches from `consumed_samples` on.

    Args:
        dataset: dataset of the samples.
        prefetch: number of batches to read ahead; 0 = read when asked for.
        batch_size_at: function from consumed samples to the next global batch size, which may ramp up.
        batches: number of batches.
        consumed_samples: number of the first sample.
        rows: function from a global batch size to the positions in the batch that this process needs.

    Raises:
        InputError: the dataset ends before the last batch.
    """

    def __init__(
        self,
        dataset: Dataset,
        prefetch: int,
        batch_size_at: Callable[[int], int],
        batches: int,
        consumed_samples: int = 0,
        rows: Callable[[int], np.ndarray] = np.arange,
    ):
        self.dataset = dataset
        self._prefetch, self._rows = prefetch, rows
        self._edges = [consumed_samples]
        while len(self) < batches:
            self._edges.append(self._edges[-1] + batch_size_at(self._edges[-1]))
        if self._edges[-1] > len(dataset):
            raise InputError(
                f"{self._edges[-1]:,} samples are needed to the end, the sources, each read once, have "
                f"{len(dataset):,}: name more of them, lower train.steps, or give each a weight, which reads them again"
            )

    def __len__(self) -> int:
        """Return the number of global batches."""
        return len(self._edges) - 1

    def __getitem__(self, i: int) -> tuple[int, Batch]:
        """Read batch `i`, counted from the start of this loader."""
        consumed, end = self._edges[i : i + 2]
        sample_ids = consumed + self._rows(end - consumed)
        return consumed, self.dataset.batch(sample_ids)

    def __iter__(self) -> Iterator[tuple[int, Batch]]:
        """Iterate with read-ahead; an error while reading is raised at its own batch."""
        if self._prefetch == 0:
            return (self[i] for i in range(len(self)))
        ahead = grain.ReadOptions(num_threads=self._prefetch, prefetch_buffer_size=self._prefetch)
        return iter(grain.MapDataset.source(self).to_iter_dataset(ahead))
