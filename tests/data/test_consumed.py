import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megajax.config import DataConfig, InputError
from megajax.data.build import build_datasets
from megajax.data.consumed import Mix, Reading, TrainingData, go_on
from megajax.data.indexed import IndexedWriter
from megajax.data.samples import Recipe
from megajax.data.tokenizers import NullTokenizer

A, B, C = (Reading(name, f"hash of {name}", 1.0) for name in "ABC")


def test_a_new_run_begins_at_the_beginning():
    assert go_on(None, 0, [A, B]) == Mix(0, (A, B))


def test_the_same_mix_goes_on():
    """Weights are relative, and files may have moved."""
    before = Mix(0, (replace(A, orders=(90,), consumed=10), replace(B, orders=(90,), consumed=10)))
    wanted = [replace(A, weight=0.5), replace(B, weight=0.5, prefix="moved/B")]

    assert go_on(before, 20, wanted) == Mix(0, (before.sources[0], replace(before.sources[1], prefix="moved/B")))


def test_another_mix_takes_up_every_source_where_it_was_left():
    a, b = replace(A, orders=(90,), consumed=12), replace(B, orders=(40, 50), first=3, consumed=8)
    mix = go_on(Mix(4, (a, b)), 20, [replace(B, weight=3.0), C])

    assert mix.start == 20
    assert mix.sources == (replace(b, weight=3.0, first=8), C)
    assert mix.left_out == (replace(a, first=12),)
    back = go_on(replace(mix, sources=(replace(b, consumed=10), replace(C, consumed=4))), 26, [A])
    assert back.sources == (replace(a, first=12),)
    assert [source.consumed for source in back.left_out] == [10, 4]


def test_whole_sources_and_shares_are_different_mixes():
    whole = [replace(A, weight=None), replace(B, weight=None)]

    assert go_on(Mix(0, tuple(whole)), 6, whole).start == 0
    assert go_on(Mix(0, tuple(whole)), 6, [A, B]).start == 6
    assert go_on(Mix(0, (A, B)), 6, whole).start == 6


def test_other_documents_under_an_old_name_are_refused():
    with pytest.raises(InputError, match=r"^B holds other documents than at the run's checkpoint"):
        go_on(Mix(0, (A, B)), 8, [A, replace(B, identity="another hash")])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three sources of 5, 9 and 14 samples of 4 tokens an epoch, no two documents alike."""
    folder = tmp_path_factory.mktemp("sources")
    for k, tokens in enumerate((21, 37, 57)):
        with IndexedWriter(folder / str(k), np.dtype(np.uint16)) as writer:
            for start in range(0, tokens, 3):
                writer.add_document(range(1000 * k + start, 1000 * k + min(start + 3, tokens)))
    return folder


def start(folder: Path, weights: dict[int, int], samples: int, mix: Mix | None = None, consumed: int = 0):
    path = [word for k, weight in weights.items() for word in (str(weight), str(folder / str(k)))]
    config = DataConfig(path=tuple(path), seq_length=4, split="1", cache_dir=str(folder / "cache"))
    built = build_datasets(Recipe(config, NullTokenizer(9999)), {"train": samples}, 1, mix, consumed)["train"]
    assert isinstance(built, TrainingData)
    return built


def save_and_load(data: TrainingData, consumed: int) -> Mix:
    return Mix.from_record(json.loads(json.dumps(data.at(consumed).to_record())))


starts = st.tuples(
    st.dictionaries(st.integers(0, 2), st.integers(1, 9), min_size=1),
    st.integers(1, 5),  # batch size
    st.integers(0, 6),  # batches before the run is stopped
    st.integers(1, 30),  # samples that it would have gone on for
)


@settings(max_examples=60, deadline=None)
@given(plans=st.lists(starts, min_size=1, max_size=6))
def test_every_source_is_read_without_gap_or_repeat(folder: Path, plans: list[tuple[dict[int, int], int, int, int]]):
    """Whatever sources, weights, batch size and length a run is started again with, and however often."""
    mix, consumed = None, 0
    read: dict[str, list[list[int]]] = {str(folder / str(k)): [] for k in range(3)}
    for weights, batch_size, batches, more in plans:
        data = start(folder, weights, consumed + batch_size * batches + more, mix, consumed)
        prefixes = {int(Path(source.prefix).name): source.prefix for source in data.mix.sources}
        for _ in range(batches):
            batch = data.batch(np.arange(consumed, consumed + batch_size))
            assert batch["loss_mask"].all()
            for tokens in batch["tokens"].tolist():
                read[prefixes[tokens[0] // 1000]].append(tokens)
            consumed += batch_size
        mix = save_and_load(data, consumed)
        for source, order in zip(mix.sources, data.blend.datasets, strict=True):
            assert source.consumed == len(read[source.prefix])
            rows = order.batch(np.arange(source.consumed + 1))["tokens"].tolist()
            assert rows[:-1] == read[source.prefix]
        for source in mix.left_out:
            assert source.consumed == len(read[source.prefix])
    assert sum(source.consumed for source in (*mix.sources, *mix.left_out)) == consumed


def test_an_order_is_read_to_its_end_before_the_next_one(folder: Path):
    """A run of 4 samples made longer: these are of an epoch of 5, and all 5 are read before one comes again."""
    data = start(folder, {0: 1}, 4)
    longer = start(folder, {0: 1}, 12, save_and_load(data, 4), 4)
    tokens = longer.batch(np.arange(12))["tokens"]

    assert longer.mix.sources[0].orders == (5, 8)
    assert len(np.unique(tokens[:5])) == 20
    assert tokens[:4].tolist() == data.batch(np.arange(4))["tokens"].tolist()


def test_a_run_that_is_made_shorter_and_longer_keeps_its_order(folder: Path):
    data = start(folder, {0: 3, 1: 2}, 20)
    again = start(
        folder, {0: 3, 1: 2}, 30, save_and_load(start(folder, {0: 3, 1: 2}, 10, save_and_load(data, 6), 6), 8), 8
    )

    assert again.mix.start == 0
    assert np.array_equal(again.batch(np.arange(20))["tokens"], data.batch(np.arange(20))["tokens"])


def test_whole_sources_give_what_is_left_of_them(folder: Path):
    """Weighted at first (8 samples), then used up: 5 + 9 samples of an epoch in all."""
    data = start(folder, {0: 1, 1: 1}, 8)
    config = DataConfig(
        path=(str(folder / "0"), str(folder / "1")), seq_length=4, split="1", cache_dir=str(folder / "c")
    )
    mix = save_and_load(data, 8)
    whole = build_datasets(Recipe(config, NullTokenizer(9999)), {"train": 99}, 1, mix, 8)["train"]

    assert len(whole) == 14
    assert [source.consumed for source in whole.at(14).sources] == [5, 9]
    assert whole.batch(np.arange(8, 14))["loss_mask"].all()


def test_the_table_says_what_will_happen(folder: Path):
    data = start(folder, {0: 1, 1: 3}, 40)
    other = start(folder, {1: 1, 2: 1}, 40, save_and_load(data, 20), 20)

    assert other.table(20) == [
        "share      read  epochs  by the end  epochs  (another mix from sample 20 on)",
        f"50.0%        15    1.67          25    2.78  {folder / '1'}",
        f"50.0%         0    0.00          10    0.71  {folder / '2'}",
        f"    -         5  left out: {folder / '0'}",
    ]
