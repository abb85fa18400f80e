import pytest
from hypothesis import given
from hypothesis import strategies as st

from megajax.config import InputError
from megajax.data.sources import SPLITS, document_range, parse_split


def ranges(split: str, documents: int) -> list[range]:
    return [document_range(bounds, documents) if bounds else range(0) for bounds in parse_split(split).values()]


def test_fractions():
    parts = parse_split("949,50,1")

    assert list(parts) == ["train", "valid", "test"]
    assert parts["train"] == (0.0, pytest.approx(0.949))
    assert parts["valid"] == (pytest.approx(0.949), pytest.approx(0.999))
    assert parts["test"] == (pytest.approx(0.999), pytest.approx(1.0))


def test_all_documents_train():
    """Case B07: the other splits are absent, not empty."""
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
    """Case B09: Megatron's newer rule."""
    assert tuple(map(len, ranges(split, documents))) == expected


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=3).filter(any), st.integers(0, 10**9))
def test_ranges_cover_every_document_once_in_order(sizes: list[float], documents: int):
    """Case B09."""
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
