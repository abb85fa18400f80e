"""Made-up documents, for speed and smoke tests without a single file (Megatron-LM's --mock-data)."""

from __future__ import annotations

from pathlib import Path

import numpy as np

SPLIT = "1,1,1"
_DOCUMENTS, _LONGEST = 100_000, 4096


class MockDocuments:
    """Documents of 1 to 4,095 tokens that count up from 1, with an end-of-document id at their end.

    What `IndexedDataset` is to a file; tokens are made up when they are read.

    Args:
        vocab_size: ids count modulo this.
        eod: end-of-document id.
    """

    def __init__(self, vocab_size: int, eod: int):
        self._vocab_size, self._eod = vocab_size, eod
        self.bin_path, self.dtype = Path("mock documents"), np.dtype(np.int32)
        self.lengths = np.random.default_rng(0).integers(1, _LONGEST, _DOCUMENTS, np.int32)
        self._ends = np.cumsum(self.lengths, dtype=np.int64)
        self.pointers = (self._ends - self.lengths) * self.dtype.itemsize

    def __len__(self) -> int:
        return len(self.lengths)

    def gather(self, starts: np.ndarray, stops: np.ndarray) -> np.ndarray:
        """Return the tokens from each start to its stop, numbered through all documents, end to end."""
        lengths = stops - starts
        places = np.arange(lengths.sum()) + np.repeat(stops - np.cumsum(lengths), lengths)
        documents = np.searchsorted(self._ends, places, side="right")
        left = self._ends[documents] - places
        counted = (self.lengths[documents] - left + 1) % self._vocab_size
        return np.where(left == 1, self._eod, counted).astype(self.dtype)
