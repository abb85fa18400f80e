"""The mapping of BERT and T5 from sentences to samples, compared with a literal walk, and its random generator."""

import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megajax.config import InputError
from megajax.data.indexed import Selection
from megajax.data.mapping import SentenceMap, build_mapping, mt19937_64, shuffled


class TestMersenne:
    def test_first_numbers(self):
        """Published with the algorithm, for the seed that C++ starts from."""
        assert mt19937_64(5489, 2).tolist() == [14514284786278117030, 4620546740167642908]

    def test_the_shuffle_takes_little_more_than_its_result(self):
        """It took 92 bytes a number, in lists."""
        tracemalloc.start()
        order = shuffled(300_000, 1)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert sorted(order.tolist()) == list(range(300_000))
        assert peak < 14 * 300_000

    def test_ten_thousandth_number(self):
        """The C++ standard demands this one ([rand.predef])."""
        assert mt19937_64(5489, 10_000)[-1] == 9981545732273789042

    def test_counts(self):
        assert mt19937_64(1, 0).tolist() == []
        assert mt19937_64(1, 700)[:313].tolist() == mt19937_64(1, 313).tolist()

    def test_shuffle_swaps_from_the_end(self):
        draws = mt19937_64(7, 3).tolist()
        order = [0, 1, 2, 3]
        for i, draw in zip((3, 2, 1), draws, strict=True):
            j = draw % (i + 1)
            order[i], order[j] = order[j], order[i]

        assert shuffled(4, 7).tolist() == order
        assert sorted(shuffled(1000, 7).tolist()) == list(range(1000))
        assert shuffled(1, 7).tolist() == [0]


def literal_mapping(documents, lengths, num_samples, longest, one_in, seed, minimum):
    """One sentence after the other, as the description has it; rows in the order in which they are found."""
    stream = np.random.RandomState(seed)

    def target() -> int:
        if one_in == 0:
            return longest
        r = int(stream.randint(0, 2**32, dtype=np.uint32))
        return 2 + r % (longest - 1) if r % one_in == 0 else longest

    rows: list[tuple[int, int, int]] = []
    while True:
        for first, end in documents:
            sizes = lengths[first:end]
            if len(sizes) < minimum or len(sizes) == 0 or (len(sizes) > 1 and max(sizes) > 512):
                continue
            start, wanted = first, target()
            for sentence in range(first, end):
                left = end - sentence - 1
                tokens, count = sum(lengths[start : sentence + 1]), sentence + 1 - start
                if (tokens >= wanted and left > 1 and count >= minimum) or left == 0:
                    rows.append((start, sentence + 1, wanted))
                    start, wanted = sentence + 1, target()
        if num_samples is None or len(rows) >= num_samples or not rows:
            return rows


class Source:
    """What a mapping reads of a token file."""

    bin_path = Path("corpus.bin")

    def __init__(self, documents: list[list[int]]):
        self.lengths = np.array([length for document in documents for length in document], np.int32)
        self.document_index = np.cumsum([0] + [len(document) for document in documents])

    @property
    def bounds(self) -> np.ndarray:
        return np.stack([self.document_index[:-1], self.document_index[1:]], axis=1)


def sentence_map(documents, tmp_path: Path, num_samples=None, seed=1234, **changes) -> SentenceMap:
    selection = Selection(Source(documents), np.arange(len(documents)), num_samples, seed, "train", tmp_path)
    return SentenceMap(selection, **{"longest": 29, "short_prob": 0.1, "min_sentences": 2, "vocab_size": 99} | changes)


DOCUMENTS = [[10, 12, 8], [20], [5, 9, 14, 6, 7], [30, 11]]


def test_vector(tmp_path: Path):
    """Megatron-LM's compiled mapping gave these rows."""
    mapping = sentence_map(DOCUMENTS, tmp_path)

    assert mapping.rows.tolist() == [[9, 11, 29], [4, 9, 29], [0, 3, 29]]
    assert mapping.rows.dtype == np.uint32


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.lists(st.sampled_from([1, 3, 7, 20, 513]), max_size=9), min_size=1, max_size=12),
    st.sampled_from([None, 1, 17]),
    st.sampled_from([2, 5, 30]),
    st.sampled_from([0, 1, 2, 10]),
    st.integers(0, 2**31),
    st.sampled_from([1, 2]),
)
def test_equals_the_literal_walk(tmp_path_factory, documents, num_samples, longest, one_in, seed, minimum):
    source = Source(documents)
    rows = literal_mapping(source.bounds.tolist(), source.lengths.tolist(), num_samples, longest, one_in, seed, minimum)
    options = {"longest": longest, "short_prob": 1 / one_in if one_in else 0.0, "seed": seed, "min_sentences": minimum}
    folder = tmp_path_factory.mktemp("cache")
    if not rows:
        with pytest.raises(InputError, match="found"):
            sentence_map(documents, folder, num_samples=num_samples, **options)
        return
    mapping = sentence_map(documents, folder, num_samples=num_samples, **options)

    assert mapping.epochs == sum(first == rows[0][0] for first, _, _ in rows)
    assert mapping.rows.tolist() == np.array(rows)[shuffled(len(rows), seed + 1)].tolist()


def test_epochs_go_on_with_the_stream():
    """The second epoch has other target lengths than the first."""
    source = Source([[5] * 40] * 20)
    once = build_mapping(source.bounds, source.lengths, None, 30, 0.5, 1, 2)
    twice = build_mapping(source.bounds, source.lengths, len(once) + 1, 30, 0.5, 1, 2)

    assert len(once) < len(twice) < 3 * len(once)
    assert len(twice) != 2 * len(once)


def test_is_cached_by_what_it_follows_from(tmp_path: Path):
    first = sentence_map(DOCUMENTS, tmp_path)
    again, other = sentence_map(DOCUMENTS, tmp_path), sentence_map(DOCUMENTS, tmp_path, seed=5)

    assert first.fingerprint == again.fingerprint != other.fingerprint
    assert not again.rows.flags.writeable  # mapped
    assert again.rows.tolist() == first.rows.tolist()


def test_single_sentences_are_refused(tmp_path: Path):
    message = r"train split needs documents with at least 2 sentences; found 0 of 3: .*or set model\.pair_task=false"
    with pytest.raises(InputError, match=message):
        sentence_map([[5], [6], []], tmp_path, num_samples=10**9)


def test_single_sentences_will_do_without_pairs(tmp_path: Path):
    mapping = sentence_map([[5], [6], []], tmp_path, min_sentences=1, num_samples=5)

    assert sorted(mapping.rows.tolist()) == [[0, 1, 29]] * 3 + [[1, 2, 29]] * 3
    assert mapping.epochs == 3


def test_documents_with_overlong_sentences_are_counted(tmp_path: Path, caplog):
    sentence_map([[5, 513], [6, 7]], tmp_path)
    assert "left out 1 documents with a sentence of over 512 tokens" in caplog.text

    with pytest.raises(InputError, match="found 1 of 1, 1 of them with a sentence of over 512 tokens"):
        sentence_map([[5, 513]], tmp_path)


def test_text_beyond_the_targets_is_told(tmp_path: Path, caplog):
    """Whole documents in place of sentences would lose most of their text in silence."""
    caplog.set_level("INFO")
    sentence_map([[20, 10, 1, 5]], tmp_path, short_prob=0.0)
    assert caplog.records[-1].levelname == "INFO"
    assert "2.8 % of the text is beyond the ends of its samples" in caplog.messages[-1]

    sentence_map([[400], [20]], tmp_path, min_sentences=1, short_prob=0.0)
    assert caplog.records[-1].levelname == "WARNING"
    assert "88 % of the text is beyond the ends of its samples: split the text into sentences" in caplog.messages[-1]
