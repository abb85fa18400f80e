"""What the loader knows of a dataset: a pure function from sample numbers to the rows of a batch."""

from __future__ import annotations

from typing import Protocol

import numpy as np

Batch = dict[str, np.ndarray]
"""Arrays with one row per sample; which ones depends on the model family (see `data.batch`)."""


class Dataset(Protocol):
    """Samples in a fixed order."""

    def __len__(self) -> int: ...

    def batch(self, sample_ids: np.ndarray) -> Batch:
        """Rows of these samples [B], in this order; a number past the end gives an empty row, without loss."""
        ...
