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


@pytest.fixture
def write_sentences(tmp_path: Path) -> WriteDocuments:
    """Write documents of sentences of given tokens, one sequence per sentence, and open them."""

    def write(documents: Sequence[Sequence[Sequence[int]]], name: str = "sentences") -> IndexedDataset:
        with IndexedWriter(tmp_path / name, np.dtype(np.uint16)) as writer:
            for sentences in documents:
                writer.add_document([token for tokens in sentences for token in tokens], [*map(len, sentences)])
        return IndexedDataset(tmp_path / name)

    return write
