import multiprocessing
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from megajax.config import DataConfig
from megajax.data.cache import fingerprint, load_or_build
from megajax.data.gpt import GPTDataset
from megajax.data.indexed import IndexedDataset, Selection
from megajax.data.tokenizers import NullTokenizer


def order_of(prefix: Path, cache_dir: Path, num_samples=20, seq_length=8, seed=1, documents=None) -> GPTDataset:
    indexed = IndexedDataset(prefix)
    indices = np.arange(documents or len(indexed), dtype=np.int32)
    config, tokenizer = DataConfig(seq_length=seq_length), NullTokenizer(99)
    return GPTDataset(Selection(indexed, indices, num_samples, seed, "train", cache_dir), config, tokenizer)


def build_in_process(prefix: Path, cache_dir: Path) -> list[list[int]]:
    return [array.tolist() for array in order_of(prefix, cache_dir).order]


@pytest.fixture
def corpus(write_documents, tmp_path: Path) -> Path:
    write_documents([range(1, 12)] * 10)
    return tmp_path / "corpus"


def test_second_build_maps_the_files_of_the_first(corpus: Path, tmp_path: Path):
    first = order_of(corpus, tmp_path / "cache")
    names = sorted(path.name for path in (tmp_path / "cache").iterdir())
    second = order_of(corpus, tmp_path / "cache")

    key = first.fingerprint
    assert names == [f"{key}-{name}_index.npy" for name in ("document", "sample", "shuffle")]
    assert not any(array.flags.writeable for array in second.order)  # mapped
    assert all(np.array_equal(a, b) for a, b in zip(first.order, second.order, strict=True))


def test_processes_build_at_once(corpus: Path, tmp_path: Path):
    """4 processes, 10 empty caches; all see the same order and nothing but finished files is left."""
    expected = build_in_process(corpus, tmp_path / "own cache")
    with ProcessPoolExecutor(4, multiprocessing.get_context("spawn")) as pool:
        for round_number in range(10):
            cache_dir = tmp_path / f"cache {round_number}"
            results = list(pool.map(build_in_process, [corpus] * 4, [cache_dir] * 4))
            assert results == [expected] * 4
            assert all(path.suffix == ".npy" and path.name[0] != "." for path in cache_dir.iterdir())
            assert len(list(cache_dir.iterdir())) == 3


def test_cache_that_cannot_be_written_is_done_without(corpus: Path, tmp_path: Path, caplog):
    """One warning, and the order is kept in memory."""
    (tmp_path / "file").touch()
    order = order_of(corpus, tmp_path / "file" / "cache").order

    assert [array.tolist() for array in order] == build_in_process(corpus, tmp_path / "cache")
    assert len(caplog.messages) == 1
    assert caplog.messages[0].startswith(f"cannot write the cache {tmp_path / 'file' / 'cache'}")


def test_damaged_cache_is_built_again(corpus: Path, tmp_path: Path):
    expected = build_in_process(corpus, tmp_path / "cache")
    for path in (tmp_path / "cache").iterdir():
        path.write_bytes(path.read_bytes()[:-10])

    assert build_in_process(corpus, tmp_path / "cache") == expected


def test_every_input_changes_the_key(write_documents, corpus: Path, tmp_path: Path):
    """Other documents under the same name, another seed, length, split or number of samples."""
    cache_dir = tmp_path / "cache"
    keys = [
        order_of(corpus, cache_dir).fingerprint,
        order_of(corpus, cache_dir, seed=2).fingerprint,
        order_of(corpus, cache_dir, seq_length=9).fingerprint,
        order_of(corpus, cache_dir, documents=9).fingerprint,
        order_of(corpus, cache_dir, num_samples=21).fingerprint,
    ]
    write_documents([range(1, 12)] * 8)
    replaced = order_of(corpus, cache_dir)

    assert len({*keys, replaced.fingerprint}) == 6
    assert set(replaced.order.document_index.tolist()) == set(range(8))


def test_fingerprint_sees_type_shape_and_bytes():
    arrays = [np.array([1, 2], np.int32), np.array([1, 2], np.int64), np.array([[1, 2]], np.int32), np.array([2, 1])]

    assert len({fingerprint(array) for array in arrays}) == 4
    assert fingerprint(arrays[0], 1, "a") == fingerprint(arrays[0].copy(), 1, "a")


def test_load_or_build_builds_once(tmp_path: Path):
    calls = []

    def build() -> tuple[np.ndarray, np.ndarray]:
        calls.append(1)
        return np.arange(3), np.ones(2)

    for _ in range(2):
        left, right = load_or_build(tmp_path / "cache", "key", ("left", "right"), build)
        assert (left.tolist(), right.tolist()) == ([0, 1, 2], [1, 1])
    assert len(calls) == 1
