from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest

from megajax.data.indexed import IndexedDataset, IndexedWriter

WriteDocuments = Callable[..., IndexedDataset]


@pytest.fixture
def write_documents(tmp_path: Path) -> WriteDocuments:
    """Write documents of given tokens as `tmp_path/NAME.bin` and `.idx`, and open them."""

    def write(documents: Sequence[Sequence[int]], name: str = "corpus", dtype: type = np.uint16) -> IndexedDataset:
        with IndexedWriter(tmp_path / name, np.dtype(dtype)) as writer:
            for tokens in documents:
                writer.add_document(tokens)
        return IndexedDataset(tmp_path / name)

    return write
