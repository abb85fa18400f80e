"""Made-up documents, and the parts of a source for training, validation and test."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megajax.config import DataConfig, InputError
from megajax.data.build import build_datasets
from megajax.data.samples import Recipe
from megajax.data.sources import SPLITS, MockDocuments, document_range, parse_split
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


def ranges(split: str, documents: int) -> list[range]:
    return [document_range(bounds, documents) if bounds else range(0) for bounds in parse_split(split).values()]


def test_fractions():
    parts = parse_split("949,50,1")

    assert list(parts) == ["train", "valid", "test"]
    assert parts["train"] == (0.0, pytest.approx(0.949))
    assert parts["valid"] == (pytest.approx(0.949), pytest.approx(0.999))
    assert parts["test"] == (pytest.approx(0.999), pytest.approx(1.0))


def test_all_documents_train():
    """The other splits are absent, not empty."""
    assert parse_split("100,0,0") == {"train": (0.0, 1.0), "valid": None, "test": None}
    assert parse_split("1") == parse_split("100, 0, 0")


@pytest.mark.parametrize(
    ("split", "documents", "expected"),
    [
        ("949,50,1", 10, (9, 1, 0)),
        ("949,50,1", 1, (1, 0, 0)),
        ("98,1,1", 3, (3, 0, 0)),
        ("969,30,1", 1000, (969, 30, 1)),
    ],
)
def test_rounding_of_small_splits(split: str, documents: int, expected: tuple[int, int, int]):
    """Megatron's newer rule."""
    assert tuple(map(len, ranges(split, documents))) == expected


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=3).filter(any), st.integers(0, 10**9))
def test_ranges_cover_every_document_once_in_order(sizes: list[float], documents: int):
    parts = [part for part in ranges(",".join(map(str, sizes)), documents) if part]

    edges = [0, *(part.stop for part in parts)]
    assert [part.start for part in parts] == edges[:-1]
    assert edges[-1] == documents


@pytest.mark.parametrize("split", ["", "a,b", "1,2,3,4", "-1,2", "nan,1", "inf,1", "0,0,0", "1.2.3"])
def test_unusable_splits_are_named(split: str):
    with pytest.raises(InputError, match=r"^split '"):
        parse_split(split)


def test_split_names():
    assert SPLITS == ("train", "valid", "test")
