"""Datasets as the loader knows them, one behind another, and rows from several of them in one batch.

A dataset is a pure function from sample numbers to the rows of a batch. Shapes: B batch, S sequence.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np

Batch = dict[str, np.ndarray]
"""Arrays with one row per sample; which ones depends on the model family (see `models.model.Model.arrays`)."""


class Dataset(Protocol):
    """Samples in a fixed order."""

    def __len__(self) -> int: ...

    def batch(self, sample_ids: np.ndarray) -> Batch:
        """Return the rows of these samples [B], in this order; a number past the end gives a row without loss."""
        ...


class Order(Dataset, Protocol):
    """Samples of one source."""

    epochs: int
    """Passes over its documents that they take."""


class Chain:
    """Orders of one source that are read one after the other."""

    def __init__(self, datasets: Sequence[Order]):
        self.datasets = datasets
        self._edges = np.cumsum([0, *map(len, datasets)])

    @property
    def per_epoch(self) -> float:
        """Return the samples in one pass over the documents."""
        return len(self.datasets[0]) / self.datasets[0].epochs

    def __len__(self) -> int:
        return int(self._edges[-1])

    def batch(self, sample_ids: np.ndarray) -> Batch:
        """Return the rows of some samples."""
        which = np.searchsorted(self._edges[1:-1], sample_ids, side="right")
        return gather_rows(self.datasets, which, sample_ids - self._edges[which], sample_ids)


def gather_rows(datasets: Sequence[Dataset], which: np.ndarray, numbers: np.ndarray, sample_ids: np.ndarray) -> Batch:
    """Make one batch of rows from several datasets.

    Args:
        datasets: to read from.
        which: the dataset of each row [B].
        numbers: the number of its sample there [B].
        sample_ids: the number of its sample in the run [B].
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
