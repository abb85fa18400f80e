"""What every dataset that reads whole documents starts from."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import numpy as np

from megajax.data.indexed import IndexedDataset


class Selection(NamedTuple):
    """Some documents of a token file and what is wanted of them."""

    indexed: IndexedDataset
    """The token file; the sequences of a document are its sentences, or the turns of a conversation."""
    indices: np.ndarray
    """The documents of it that may be used."""
    num_samples: int | None
    """At least this many samples, over as many epochs as that takes; None = one epoch."""
    seed: int
    """Of the order, and with the number of a sample of what is random in it."""
    name: str
    """Of the split, for messages."""
    cache_dir: Path | None
    """Where the order is kept; None = nowhere."""

    @property
    def bounds(self) -> np.ndarray:
        """First sequence and sequence after the last one of every document, int64 [documents, 2]."""
        starts = self.indexed.document_index
        return np.stack([starts[self.indices], starts[self.indices + 1]], axis=1)

    @property
    def where(self) -> str:
        """File and split, for messages."""
        return f"{self.indexed.bin_path}: the {self.name} split"
