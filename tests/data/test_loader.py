import itertools

import numpy as np
import pytest

from megajax.config import InputError
from megajax.data.loader import Loader

READ_AHEAD = pytest.mark.parametrize("prefetch", [0, 3])


class Numbers:
    """Sample i is the tokens i, i+1 and the labels after them; one of them cannot be read."""

    def __init__(self, length: int, bad: int | None = None):
        self._length, self._bad = length, bad

    def __len__(self) -> int:
        return self._length

    def batch(self, sample_ids: np.ndarray) -> dict[str, np.ndarray]:
        if self._bad in sample_ids:
            raise InputError(f"sample {self._bad} cannot be read")
        tokens = sample_ids[:, None] + np.arange(2)
        return {"tokens": tokens, "labels": tokens + 1, "sample_ids": sample_ids}


def load(dataset, batch_size=4, prefetch=0, batches=None, consumed_samples=0, **settings) -> Loader:
    """A loader of as many batches as there are, or of `batches`."""
    sizes = batch_size if callable(batch_size) else lambda consumed: batch_size
    if batches is None:
        edge, batches = consumed_samples, 0
        while edge + sizes(edge) <= len(dataset):
            edge, batches = edge + sizes(edge), batches + 1
    return Loader(dataset, prefetch, sizes, batches, consumed_samples, **settings)


def ids(loader) -> list[list[int]]:
    return [batch["sample_ids"].tolist() for _, batch in loader]


@READ_AHEAD
def test_batches_are_consecutive_samples(prefetch: int):
    loader = load(Numbers(11), prefetch=prefetch)
    batches = list(loader)

    assert len(loader) == 2
    assert [consumed for consumed, _ in batches] == [0, 4]
    assert batches[1][1]["tokens"].tolist() == [[4, 5], [5, 6], [6, 7], [7, 8]]
    assert batches[1][1]["labels"].tolist() == [[5, 6], [6, 7], [7, 8], [8, 9]]
    assert ids(loader) == [[0, 1, 2, 3], [4, 5, 6, 7]]


@READ_AHEAD
def test_resumed_loader_continues_the_stream(prefetch: int):
    """A run of 12 steps stopped after step 6 makes 6 more, from the next batch on."""
    dataset = Numbers(48)
    uninterrupted = ids(load(dataset, prefetch=prefetch))
    resumed = load(dataset, prefetch=prefetch, consumed_samples=24)

    assert len(resumed) == 6
    assert ids(resumed) == uninterrupted[6:]


def half(rank: int):
    return lambda size: np.arange(size)[rank * size // 2 : (rank + 1) * size // 2]


def test_processes_share_a_batch_without_overlap():
    """2 processes, global batch 4: 4 different samples a step and 8 over the run."""
    first, second = (ids(load(Numbers(8), rows=half(rank))) for rank in range(2))

    assert (first, second) == ([[0, 1], [4, 5]], [[2, 3], [6, 7]])


def test_global_batches_do_not_depend_on_the_number_of_processes():
    """3 steps on 2 processes, the rest on 1, and back."""
    dataset = Numbers(24)
    whole = ids(load(dataset))
    on_two = [a + b for a, b in zip(*(ids(load(dataset, rows=half(rank))) for rank in range(2)), strict=True)]

    assert on_two[:3] + ids(load(dataset, consumed_samples=12)) == whole
    resumed = [
        a + b
        for a, b in zip(*(ids(load(dataset, rows=half(rank), consumed_samples=12)) for rank in range(2)), strict=True)
    ]
    assert whole[:3] + resumed == whole


def test_batch_size_ramps_up_and_resumes_in_the_middle():
    def ramp(consumed: int) -> int:
        return 2 if consumed < 4 else 4

    assert ids(load(Numbers(13), ramp)) == [[0, 1], [2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]
    assert ids(load(Numbers(13), ramp, consumed_samples=2)) == [[2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]


@READ_AHEAD
def test_every_epoch_uses_every_sample(prefetch: int):
    """9 samples an epoch and batches of 4: only the end of the stream is dropped, not that of each epoch."""
    served = list(itertools.chain(*ids(load(Numbers(27), prefetch=prefetch))))

    assert served == list(range(24))
    assert set(np.bincount(np.array(served) % 9).tolist()) == {2, 3}


@READ_AHEAD
def test_reading_error_surfaces_where_it_belongs(prefetch: int):
    batches = iter(load(Numbers(20, bad=9), prefetch=prefetch))

    assert [next(batches)[0], next(batches)[0]] == [0, 4]
    with pytest.raises(InputError) as caught:
        next(batches)
    assert str(caught.value) == "sample 9 cannot be read"


@READ_AHEAD
def test_no_batch_left(prefetch: int):
    loader = load(Numbers(8), prefetch=prefetch, consumed_samples=5)

    assert len(loader) == 0
    assert list(loader) == []
