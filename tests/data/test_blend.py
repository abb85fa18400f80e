import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megajax.config import InputError
from megajax.data.blend import BlendedDataset, Source, blend_order, parse_data_path, source_sizes
from megajax.data.dataset import Chain


def test_order_equals_megatron():
    sources, samples = blend_order((0.5, 0.3, 0.2), 12)

    assert sources.tolist() == [0, 1, 2, 0, 1, 0, 2, 0, 1, 0, 0, 1]
    assert samples.tolist() == [0, 0, 0, 1, 1, 2, 1, 3, 2, 4, 5, 3]
    assert (sources.dtype, samples.dtype) == (np.int16, np.int64)


def test_sources_used_whole_equal_megatron():
    sources, _ = blend_order((5, 3, 1), 9)

    assert sources.tolist() == [0, 1, 2, 0, 1, 0, 0, 1, 0]


@pytest.mark.parametrize("weights", [(0.3, 0.7), (3, 7), (30, 70)])
def test_weights_are_relative(weights: tuple[float, float]):
    sources, _ = blend_order(weights, 10)

    assert sources.tolist() == [1, 0, 1, 1, 0, 1, 1, 0, 1, 1]


@given(st.lists(st.floats(0.01, 100), min_size=1, max_size=6), st.integers(0, 300))
def test_counts_stay_within_one_of_the_share(weights: list[float], length: int):
    sources, samples = blend_order(weights, length)

    for k, weight in enumerate(weights):
        numbers = samples[sources == k]
        assert numbers.tolist() == list(range(len(numbers)))
        assert abs(len(numbers) - length * weight / sum(weights)) < len(weights)


@given(st.lists(st.integers(1, 60), min_size=1, max_size=6))
def test_every_source_is_used_up_exactly(sizes: list[int]):
    sources, _ = blend_order(sizes, sum(sizes))

    assert np.bincount(sources, minlength=len(sizes)).tolist() == sizes


def test_sources_build_half_a_percent_more():
    assert source_sizes((3, 7), 1000) == ([300, 700], [302, 704])
    assert source_sizes((1.0,), 10) == ([10], [11])


def test_data_path_grammar():
    assert parse_data_path(["a"]) == [Source("a", None)]
    assert parse_data_path(["1"]) == [Source("1", None)]
    assert parse_data_path(["a", "b"]) == [Source("a", None), Source("b", None)]
    assert parse_data_path(["a", "b", "c"]) == [Source("a", None), Source("b", None), Source("c", None)]
    assert parse_data_path(["0.3", "a", "7e-1", "2"]) == [Source("a", 0.3), Source("2", 0.7)]
    assert parse_data_path(["1.0", "a"]) == [Source("a", 1.0)]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["-1", "a", "2", "b"], "weight -1 of a is not a positive"),
        (["nan", "a", "1", "b"], "weight nan of a is not a positive"),
        (["0", "a", "0", "b"], "weight 0 of a is not a positive"),
        (["inf", "a", "1", "b"], "weight inf of a is not a positive"),
        (["0.5", "a", "0.5", "b", "c"], r"2 weights \(0.5, 0.5\) for 3 prefixes"),
        (["0.5", "a", "b", "c"], r"1 weights \(0.5\) for 3 prefixes"),
        (["a", "0.5", "b", "0.5"], r"2 weights \(0.5, 0.5\) for 2 prefixes"),
    ],
)
def test_bad_weights_are_named(words: list[str], message: str):
    with pytest.raises(InputError, match=f"^data path: {message}"):
        parse_data_path(words)


class Numbers:
    """Sample i is the number 100 * k + i."""

    def __init__(self, k: int, length: int):
        self._k, self._length = k, length

    def __len__(self) -> int:
        return self._length

    def batch(self, sample_ids: np.ndarray) -> dict[str, np.ndarray]:
        """-1 is an empty row."""
        numbers = np.where(sample_ids < len(self), 100 * self._k + sample_ids, -1)
        return {"tokens": numbers[:, None].astype(np.int32), "sample_ids": sample_ids.astype(np.uint32)}


def read(dataset, *sample_ids: int) -> list[int]:
    batch = dataset.batch(np.array(sample_ids))
    assert batch["sample_ids"].tolist() == list(sample_ids)
    return batch["tokens"][:, 0].tolist()


def test_blend_reads_its_sources(tmp_path):
    blend = BlendedDataset([Numbers(0, 6), Numbers(1, 4), Numbers(2, 2)], (0.5, 0.3, 0.2), 12, tmp_path)

    assert len(blend) == 12
    assert read(blend, *range(12)) == [0, 100, 200, 1, 101, 2, 201, 3, 102, 4, 5, 103]
    assert read(blend, 9, 12, 0) == [4, -1, 0]


def test_a_later_mix_reads_on(tmp_path):
    """From sample 10 of the run on; 4 samples of the first source and 2 of the second were read before."""
    blend = BlendedDataset([Numbers(0, 9), Numbers(1, 9)], (1, 1), 4, tmp_path, start=10, first=(4, 2))

    assert len(blend) == 14
    assert read(blend, *range(10, 15)) == [4, 102, 5, 103, -1]
    assert [blend.consumed(samples) for samples in (10, 11, 14)] == [[4, 2], [5, 2], [6, 4]]


def test_a_single_source_is_read_in_order(tmp_path):
    blend = BlendedDataset([Numbers(0, 9)], (1.0,), 4, tmp_path, start=3, first=(5,))

    assert read(blend, 3, 6, 7) == [5, 8, -1]
    assert blend.consumed(6) == [8]
    assert list(tmp_path.iterdir()) == []


def test_orders_are_chained():
    chain = Chain([Numbers(0, 3), Numbers(1, 2), Numbers(2, 4)])

    assert len(chain) == 9
    assert read(chain, 8, 0, 3, 4, 5, 2, 9) == [203, 0, 100, 101, 200, 2, -1]


def test_asking_too_much_of_a_source_is_an_error(tmp_path):
    with pytest.raises(InputError, match=r"source 2 with weight 0\.3 is asked for 4 samples and has 3"):
        BlendedDataset([Numbers(0, 6), Numbers(1, 3), Numbers(2, 2)], (0.5, 0.3, 0.2), 12, tmp_path)


def test_an_order_is_kept_by_weights_and_length(tmp_path):
    """Whatever the sources are: three orders of two arrays each, and each mix has its own."""
    a, b, c = Numbers(0, 9), Numbers(1, 9), Numbers(2, 9)
    mixes = [((a, b), (1, 1), 4), ((b, a), (1, 1), 4), ((a, c), (1, 1), 4), ((a, b), (1, 2), 4), ((a, b), (1, 1), 5)]
    for sources, weights, length in 2 * mixes:
        blend, fresh = (BlendedDataset(sources, weights, length, folder) for folder in (tmp_path, None))
        assert read(blend, *range(length)) == read(fresh, *range(length))
    assert len(list(tmp_path.iterdir())) == 3 * 2


def test_a_source_with_nothing_left_is_never_drawn():
    assert blend_order([0.0, 9.0], 4)[0].tolist() == [1, 1, 1, 1]
