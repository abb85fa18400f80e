import numpy as np

from megajax.config import DataConfig
from megajax.data.gpt import make_batch, token_batch

E = 99


def one(sample: list[int], eod: int = E, seq_length: int | None = None, **settings) -> dict[str, list]:
    config = DataConfig(seq_length=seq_length or len(sample) - 1, **settings)
    batch = make_batch([np.array(sample, np.int32)], np.array([7]), config, eod)
    return {name: value[0].tolist() for name, value in batch.items()}


def test_labels_are_the_next_tokens():
    assert one([5, 6, E, 8]) == {
        "tokens": [5, 6, E],
        "labels": [6, E, 8],
        "loss_mask": [1, 1, 1],
        "positions": [0, 1, 2],
        "sample_ids": 7,
    }


def test_documents_are_kept_apart():
    """Query 4 sees only key 4, query 5 keys 4-5, query 7 key 7; predicting E is trained, across E is not."""
    row = one([5, 6, 7, E, 8, 9, E, 3, 4], reset_positions=True, reset_attention=True, mask_eod_loss=True)

    assert row["positions"] == [0, 1, 2, 3, 0, 1, 2, 0]
    assert row["loss_mask"] == [1, 1, 1, 0, 1, 1, 0, 1]
    segments = np.array(row["segment_ids"])
    sees = np.tril(segments[:, None] == segments[None, :])
    assert np.flatnonzero(sees[4]).tolist() == [4]
    assert np.flatnonzero(sees[5]).tolist() == [4, 5]
    assert np.flatnonzero(sees[7]).tolist() == [7]


def test_padding_is_known_by_its_place():
    """The end-of-document id is also the padding, and both real ends keep their loss."""
    row = one([5, 6, 0, 7, 8, 0], eod=0, seq_length=7, reset_attention=True)

    assert row["tokens"] == [5, 6, 0, 7, 8, 0, 0]
    assert row["labels"] == [6, 0, 7, 8, 0, 0, 0]
    assert row["loss_mask"] == [1, 1, 1, 1, 1, 0, 0]
    assert row["segment_ids"] == [0, 0, 0, 1, 1, 1, 2]


def test_neighbouring_ends_and_a_leading_end():
    row = one([E, E, 5, 6, E], reset_positions=True, reset_attention=True)

    assert row["positions"] == [0, 0, 0, 1]
    assert row["segment_ids"] == [0, 1, 2, 2]


def test_shapes_and_types():
    samples = [np.arange(9, dtype=np.int32)] * 3
    batch = make_batch(samples, np.array([0, 2**32 - 1, 2**32 + 5]), DataConfig(seq_length=8), E)
    kept_apart = make_batch(samples, np.arange(3), DataConfig(seq_length=8, reset_attention=True), E)

    assert {name: (value.shape, value.dtype.name) for name, value in batch.items()} == {
        "tokens": ((3, 8), "int32"),
        "labels": ((3, 8), "int32"),
        "loss_mask": ((3, 8), "float32"),
        "positions": ((3, 8), "int32"),
        "sample_ids": ((3,), "uint32"),
    }
    assert kept_apart.keys() - batch.keys() == {"segment_ids"}
    assert (kept_apart["segment_ids"].shape, kept_apart["segment_ids"].dtype) == ((3, 8), np.int32)
    assert batch["sample_ids"].tolist() == [0, 2**32 - 1, 5]


def test_nothing_is_copied_that_can_be_looked_at():
    raw = np.arange(18, dtype=np.int32).reshape(2, 9)
    batch = token_batch(raw, np.array([9, 9]), np.arange(2), DataConfig(seq_length=8), E)

    assert all(np.shares_memory(batch[name], raw) for name in ("tokens", "labels"))
    assert batch["positions"].strides[0] == 0
