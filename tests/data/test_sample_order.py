import logging

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megajax.config import DataConfig, InputError
from megajax.data.gpt import GPTDataset, build_sample_order, sample_starts
from megajax.data.indexed import IndexedDataset, IndexedWriter, Selection
from megajax.data.tokenizers import NullTokenizer

LENGTHS = np.array([7, 3, 12, 5, 9, 1, 4], np.int32)

# produced by Megatron-LM's own C++ and NumPy code: samples wanted -> document, sample and shuffle index
MEGATRON = {
    None: (
        [2, 1, 6, 0, 4, 5, 3],
        [(0, 0), (0, 8), (2, 1), (3, 5), (4, 6), (6, 4)],
        [2, 0, 4, 3, 1],
    ),
    10: (
        [5, 3, 0, 4, 6, 2, 2, 0, 1, 1, 4, 5, 6, 3],
        [(0, 0), (2, 2), (3, 3), (4, 2), (5, 6), (6, 2), (6, 10), (7, 6), (10, 1), (11, 0), (13, 3)],
        [3, 9, 2, 1, 7, 5, 4, 0, 8, 6],
    ),
    16: (
        [3, 6, 2, 2, 0, 5, 4, 0, 1, 4, 3, 4, 3, 2, 0, 1, 6, 5, 6, 5, 1, 6, 4, 1, 5, 3, 0, 2],
        [
            *((0, 0), (1, 3), (2, 7), (3, 3), (3, 11), (5, 0), (6, 7), (7, 6), (9, 4), (10, 3), (11, 6), (13, 0)),
            *((13, 8), (14, 4), (16, 2), (20, 0), (22, 1), (23, 0), (25, 4), (27, 0), (27, 8)),
        ],
        [8, 5, 14, 1, 4, 11, 2, 12, 13, 9, 0, 7, 3, 10, 6, 16, 17, 15, 19, 18],
    ),
}


@pytest.mark.parametrize("num_samples", MEGATRON)
def test_order_equals_megatron(num_samples: int | None):
    order = build_sample_order(LENGTHS, np.arange(7, dtype=np.int32), num_samples, seq_length=8, seed=1234)

    documents, samples, shuffle = MEGATRON[num_samples]
    assert order.document_index.tolist() == documents
    assert list(map(tuple, order.sample_index.tolist())) == samples
    assert order.shuffle_index.tolist() == shuffle
    assert [array.dtype for array in order] == [np.int32, np.int32, np.uint32]


def walk(lengths: list[int], samples: int, seq_length: int) -> list[tuple[int, int]]:
    """Find the same cuts by walking over the sequences sample by sample."""
    starts, position, offset = [(0, 0)], 0, 0
    for _ in range(samples):
        missing = seq_length + 1
        while missing > lengths[position] - offset:
            missing -= lengths[position] - offset
            position, offset = position + 1, 0
        # the next sample begins with the last token of this one
        offset += missing - 1
        starts.append((position, offset))
    return starts


@given(st.lists(st.integers(0, 20), min_size=1, max_size=40).filter(any), st.integers(1, 30))
def test_closed_form_equals_a_walk(lengths: list[int], seq_length: int):
    """Empty documents included."""
    samples = (sum(lengths) - 1) // seq_length

    starts = sample_starts(np.array(lengths, np.int32), np.arange(len(lengths)), samples, seq_length)
    assert list(map(tuple, starts.tolist())) == walk(lengths, samples, seq_length)


@given(
    st.lists(st.integers(0, 20), min_size=1, max_size=10).filter(any),
    st.none() | st.integers(1, 60),
    st.integers(1, 12),
    st.integers(0, 2**32 - 1),
)
def test_order_is_a_permutation_with_enough_samples(
    lengths: list[int], num_samples: int | None, seq_length: int, seed: int
):
    indices = np.arange(len(lengths), dtype=np.int32)
    order = build_sample_order(np.array(lengths, np.int32), indices, num_samples, seq_length, seed)

    epochs, rest = divmod(len(order.document_index), len(lengths))
    assert rest == 0
    assert np.bincount(order.document_index).tolist() == [epochs] * len(lengths)
    assert sorted(order.shuffle_index.tolist()) == list(range(len(order.shuffle_index)))
    assert len(order.sample_index) == len(order.shuffle_index) + 1
    if num_samples is not None:
        assert (epochs - 1) * sum(lengths) <= num_samples * seq_length < epochs * sum(lengths)
        assert len(order.shuffle_index) >= num_samples


def test_offsets_exceed_32_bits():
    """The index of 1.2 million samples of 2048 tokens ends at token 2,457,600,000."""
    starts = sample_starts(np.full(3, 2**30, np.int32), np.arange(3), samples=1_200_000, seq_length=2048)

    position, offset = starts[1_200_000].tolist()
    assert position * 2**30 + offset == 2_457_600_000
    assert (starts >= 0).all()


def dataset(indexed, tmp_path, num_samples=None, seq_length=8, seed=1234, vocab_size=2000) -> GPTDataset:
    indices, config = np.arange(len(indexed), dtype=np.int32), DataConfig(seq_length=seq_length)
    cache_dir = tmp_path / "cache"
    tokenizer = NullTokenizer(vocab_size - 1)
    return GPTDataset(Selection(indexed, indices, num_samples, seed, "train", cache_dir), config, tokenizer)


@pytest.mark.parametrize("num_samples", MEGATRON)
def test_samples_are_cuts_of_the_joined_documents(write_documents, tmp_path, num_samples: int | None):
    documents = [[100 * i + j for j in range(length)] for i, length in enumerate(LENGTHS)]
    samples = dataset(write_documents(documents), tmp_path, num_samples)

    order, _, shuffle = MEGATRON[num_samples]
    joined = np.concatenate([documents[i] for i in order])
    assert len(samples) == len(shuffle)
    for i, row in enumerate(shuffle):
        assert samples.tokens(np.array([i])).tolist() == [joined[row * 8 : row * 8 + 9].tolist()]
    together = samples.tokens(np.arange(len(samples)))
    assert together.tolist() == [joined[row * 8 : row * 8 + 9].tolist() for row in shuffle]
    assert together.dtype == np.int32


@pytest.mark.parametrize(("tokens", "count"), [(101, 10), (100, 9)])
def test_neighbouring_samples_share_one_token(write_documents, tmp_path, tokens: int, count: int):
    """Sample k has inputs 10k..10k+9 and labels 10k+1..10k+10."""
    samples = dataset(write_documents([range(tokens)]), tmp_path, seq_length=10)

    assert len(samples) == count
    in_order = sorted(samples.tokens(np.arange(count)).tolist())
    assert in_order == [list(range(10 * k, 10 * k + 11)) for k in range(count)]


def test_corpus_shorter_than_a_sample_wraps(write_documents, tmp_path):
    """7 tokens, 4 samples of 16 wanted: 10 epochs."""
    samples = dataset(write_documents([[1, 2, 3, 4], [5, 6, 7]]), tmp_path, num_samples=4, seq_length=16)

    assert samples.epochs == 10
    assert len(samples) == 4
    assert (samples.order.sample_index >= 0).all()
    assert samples.tokens(np.arange(4)).shape == (4, 17)


@pytest.mark.parametrize(
    ("documents", "num_samples", "message"),
    [
        ([[1, 2, 3, 4], [5, 6, 7]], None, "2 documents has 7 tokens and one sample needs 17"),
        ([[], []], 4, "0 documents has 0 tokens"),
    ],
)
def test_too_little_text_is_an_error(write_documents, tmp_path, documents, num_samples, message: str):
    with pytest.raises(InputError, match=rf"corpus\.bin: the train split of {message}"):
        dataset(write_documents(documents), tmp_path, num_samples, seq_length=16)


def test_sequences_without_tokens_are_stepped_over(tmp_path):
    with IndexedWriter(tmp_path / "corpus", np.dtype(np.uint16)) as writer:
        writer.add_document([1, 2, 3, 4, 5], lengths=[0, 3, 0, 0, 2])
    samples = dataset(IndexedDataset(tmp_path / "corpus"), tmp_path, seq_length=4)

    assert len(samples) == 1
    assert samples.tokens(np.array([0])).tolist() in ([[1, 2, 3, 4, 5]], [[4, 5, 1, 2, 3]])


def test_numbers_past_the_end_are_empty_rows(write_documents, tmp_path):
    samples = dataset(write_documents([range(1, 18)]), tmp_path)
    batch = samples.batch(np.array([2, 1, 5, 0]))

    assert len(samples) == 2
    assert batch["loss_mask"].sum(axis=1).tolist() == [0, 8, 0, 8]
    assert batch["tokens"][[0, 2]].max() == 0
    assert sorted(batch["tokens"][[1, 3]].tolist()) == [list(range(1, 9)), list(range(9, 17))]
    assert batch["sample_ids"].tolist() == [2, 1, 5, 0]


@pytest.mark.parametrize(("token", "dtype"), [(50, np.uint16), (-1, np.int32)])
def test_token_outside_the_vocabulary_names_file_and_id(write_documents, tmp_path, token: int, dtype: type):
    samples = dataset(write_documents([[1, 2, token, 4, 5]], dtype=dtype), tmp_path, seq_length=4, vocab_size=50)

    with pytest.raises(InputError, match=rf"corpus\.bin: token id {token} outside the vocabulary of 50"):
        samples.batch(np.array([0]))


def test_no_sample_is_missing_from_every_epoch(write_documents, tmp_path):
    """9 documents of one sample each, 24 samples over 3 epochs."""
    samples = dataset(write_documents([[i] * 8 for i in range(9)]), tmp_path, num_samples=24)

    uses = np.bincount(samples.tokens(np.arange(24))[:, 0], minlength=9)
    assert samples.epochs == 3
    assert set(uses.tolist()) <= {1, 2, 3}


@settings(max_examples=20)
@given(st.integers(0, 2**31))
def test_order_depends_on_the_seed_only(seed: int):
    indices = np.arange(7, dtype=np.int32)
    first, second = (build_sample_order(LENGTHS, indices, 10, 8, seed) for _ in range(2))

    assert all(np.array_equal(a, b) for a, b in zip(first, second, strict=True))


def test_nothing_is_logged_on_the_way(write_documents, tmp_path, caplog):
    with caplog.at_level(logging.INFO):
        dataset(write_documents([range(50)]), tmp_path).batch(np.arange(2))

    assert caplog.records == []
