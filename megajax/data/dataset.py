"""Interface of datasets, chains of them, and batches with rows from several of them.

A dataset is a pure function from sample numbers to the rows of a batch. Shapes: B batch, S sequence.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np

Batch = dict[str, np.ndarray]
"""Arrays with one row per sample; the model family decides which ones (see `models.model.Model.arrays`)."""


class Dataset(Protocol):
    """Provide samples in a fixed order."""

    def __len__(self) -> int: ...

    def batch(self, sample_ids: np.ndarray) -> Batch:
        """Return the rows of these samples [B], in this order; a number past the end gives a row without loss."""
        ...


class Order(Dataset, Protocol):
    """The samples of one source in one order."""

    epochs: int
    """Number of passes over the source's documents that the samples take."""


class Chain:
    """Read several orders of one source one after another."""

    def __init__(self, datasets: Sequence[Order]):
        self.datasets = datasets
        self._edges = np.cumsum([0, *map(len, datasets)])

    @property
    def per_epoch(self) -> float:
        """Return the number of samples in one pass over the documents."""
        return len(self.datasets[0]) / self.datasets[0].epochs

    def __len__(self) -> int:
        return int(self._edges[-1])

    def batch(self, sample_ids: np.ndarray) -> Batch:
        """Return the rows of these samples."""
        which = np.searchsorted(self._edges[1:-1], sample_ids, side="right")
        return gather_rows(self.datasets, which, sample_ids - self._edges[which], sample_ids)


def gather_rows(datasets: Sequence[Dataset], which: np.ndarray, numbers: np.ndarray, sample_ids: np.ndarray) -> Batch:
    """Return one batch of rows from several datasets.

    Args:
        datasets: datasets from which rows are read.
        which: index of each row's dataset [B].
        numbers: number of each row's sample in its dataset [B].
        sample_ids: number of each row's sample in the run [B].
    """
    batch: Batch = {}
    for k in np.unique(which).tolist():
        rows = np.flatnonzero(which == k)
        part = datasets[k].batch(numbers[rows])
        if len(rows) == len(which):
            return {**part, "sample_ids": sample_ids.astype(np.uint32)}
        for name, array in part.items():
            batch.setdefault(name, np.empty((len(which), *array.shape[1:]), array.dtype))[rows] = array
    return {**batch, "sample_ids": sample_ids.astype(np.uint32)}
