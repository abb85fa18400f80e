import numpy as np
import pytest

from megajax.config import DataConfig, InputError
from megajax.data.build import build_datasets
from megajax.data.samples import Recipe
from megajax.data.sources import MockDocuments
from megajax.data.tokenizers import NullTokenizer


def test_documents_are_those_of_megatron():
    """Document of length n: 1, 2, ... n - 1 modulo the vocabulary, and the end."""
    documents = MockDocuments(vocab_size=100, eod=99)
    starts = documents.pointers // documents.dtype.itemsize
    for i in (0, 1, 77_777, 99_999):
        n = int(documents.lengths[i])
        tokens = documents.gather(starts[i : i + 1], starts[i : i + 1] + n)
        assert tokens.tolist() == [*(np.arange(1, n) % 100).tolist(), 99]
    assert len(documents) == 100_000
    assert documents.lengths[:3].tolist() == np.random.default_rng(0).integers(1, 4096, 3, np.int32).tolist()


def test_pieces_are_joined():
    documents = MockDocuments(vocab_size=10_000, eod=9999)
    n = int(documents.lengths[0])

    assert documents.gather(np.array([n - 2, 3]), np.array([n + 2, 5])).tolist() == [n - 1, 9999, 1, 2, 4, 5]


def test_no_files_are_needed_or_written(tmp_path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    sizes = {"train": 10, "valid": None, "test": 0}
    built = build_datasets(Recipe(DataConfig(mock=True, seq_length=8), NullTokenizer(999)), sizes, 1)

    assert built["train"].batch(np.arange(10))["tokens"].shape == (10, 8)
    assert built["valid"].batch(np.arange(2))["loss_mask"].all()
    assert built["test"] is None
    assert list(tmp_path.iterdir()) == []


def test_mock_is_for_gpt_only():
    with pytest.raises(InputError, match=r"^data\.mock and data\.fim_rate are for gpt samples, not for t5"):
        build_datasets(Recipe(DataConfig(mock=True), NullTokenizer(999), "t5"), {"train": 1}, 1)
