"""T5 samples, compared with a literal reading of their description, and properties of all samples."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from megajax.config import DataConfig, InputError
from megajax.data.indexed import Selection
from megajax.data.t5 import T5Dataset
from megajax.data.tokenizers import NullTokenizer
from megajax.data.tokenizers.fast import FastTokenizer, bert_wordpiece

VOCABULARY = "[PAD] [UNK] [CLS] [SEP] [MASK]".split() + [f"w{i}" for i in range(30)] + [f"##c{i}" for i in range(15)]
"""Ids 5 to 34 begin a word, ids 35 to 49 go on with one; 50 is [BOS], 51 [EOS], sentinels follow."""
BOS, EOS = 50, 51


def joined(lists) -> list:
    return [item for items in lists for item in items]


def wordpiece(folder: Path, extra_ids: int = 30) -> FastTokenizer:
    (folder / "vocab.txt").write_text("\n".join(VOCABULARY))
    return bert_wordpiece(folder / "vocab.txt", lower_case=True, extra_ids=extra_ids)


@pytest.fixture
def build(write_sentences, tmp_path: Path):
    def build_dataset(documents, seed: int = 1234, tokenizer=None, **changes) -> T5Dataset:
        num_samples = changes.pop("num_samples", None)
        config = replace(DataConfig(seq_length=32, decoder_seq_length=24), **changes)
        indices = np.arange(len(documents))
        selection = Selection(write_sentences(documents), indices, num_samples, seed, "train", tmp_path / "cache")
        return T5Dataset(selection, config, tokenizer or wordpiece(tmp_path))

    return build_dataset


def random_documents(seed: int, count: int) -> list[list[list[int]]]:
    rng = np.random.default_rng(seed)
    return [
        [rng.integers(5, 50, rng.integers(1, 12)).tolist() for _ in range(rng.integers(1, 9))] for _ in range(count)
    ]


def literal_spans(tokens, target, rng, mask_prob):
    words = []
    for place, token in enumerate(tokens):
        if token >= 35 and words:
            words[-1].append(place)
        else:
            words.append([place])
    ngrams = [[joined(words[i : i + n]) for n in range(1, 11)] for i in range(len(words))]
    rng.shuffle(ngrams)
    limit = min(mask_prob * target, max(1, round(mask_prob * len(tokens))))
    spans: list[list[int]] = []
    for choices in ngrams:
        taken = joined(spans)
        if len(taken) >= limit:
            break
        n = min(rng.geometric(0.2), 10)
        while n and len(taken) + len(choices[n - 1]) > limit:
            n -= 1
        if n and not set(taken) & set(choices[n - 1]):
            spans.append(choices[n - 1])
    return sorted(spans)


@pytest.mark.parametrize("mask_prob", [0.15, 0.4])
def test_equals_the_literal_description(build, mask_prob: float):
    documents = random_documents(0, 40)
    flat = joined(documents)
    dataset = build(documents, num_samples=200, mask_prob=mask_prob)
    batch = dataset.batch(np.arange(len(dataset)))

    for number, (first, stop, target) in enumerate(dataset._map.rows.tolist()):
        tokens = joined(flat[first:stop])[:target]
        spans = literal_spans(tokens, target, np.random.RandomState(1234 + number), mask_prob)
        encoder = list(tokens)
        for i, span in reversed(list(enumerate(spans))):
            encoder[span[0] : span[-1] + 1] = [52 + i]
        decoder = joined([52 + i, *(tokens[place] for place in span)] for i, span in enumerate(spans))
        s, t = len(encoder), len(decoder) + 1
        assert batch["tokens"][number].tolist() == encoder + [0] * (32 - s)
        assert batch["segment_ids"][number].tolist() == [0] * s + [1] * (32 - s)
        assert batch["decoder_tokens"][number].tolist() == [BOS, *decoder] + [0] * (24 - t)
        assert batch["labels"][number, :t].tolist() == [*decoder, EOS]
        assert batch["loss_mask"][number].tolist() == [1.0] * t + [0.0] * (24 - t)
        assert batch["decoder_segment_ids"][number].tolist() == [0] * t + [1] * (24 - t)


def restored(tokens: list[int], spans: list[int], first_sentinel: int) -> list[int]:
    """Put every span back in the place of its sentinel."""
    contents: dict[int, list[int]] = {}
    for token in spans:
        if token >= first_sentinel:
            sentinel = token
            contents[sentinel] = []
        else:
            contents[sentinel].append(token)
    return joined(contents.pop(token) if token >= first_sentinel else [token] for token in tokens)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.integers(0, 2**32 - 1), st.floats(0.05, 0.9), st.sampled_from([2, 5, 24]), st.sampled_from([1, 3, 30]))
def test_spans_restore_the_text(tmp_path_factory, write_sentences, seed, mask_prob, decoder, sentinels):
    """Also where decoder or sentinels have no room for all: those spans stay in the text, nothing is cut off."""
    documents, folder = random_documents(seed % 1000, 6), tmp_path_factory.mktemp("t5")
    config = DataConfig(seq_length=32, decoder_seq_length=decoder, mask_prob=mask_prob)
    selection = Selection(write_sentences(documents, f"corpus{seed}"), np.arange(6), None, seed, "train", folder)
    dataset = T5Dataset(selection, config, wordpiece(folder, sentinels))
    flat, batch = joined(documents), dataset.batch(np.arange(len(dataset)))
    for number, (first, stop, target) in enumerate(dataset._map.rows.tolist()):
        tokens = batch["tokens"][number][batch["segment_ids"][number] == 0].tolist()
        labels = batch["labels"][number][batch["loss_mask"][number] == 1].tolist()

        assert labels[-1] == EOS
        assert restored(tokens, labels[:-1], 52) == joined(flat[first:stop])[:target]
        used = [token for token in tokens if token >= 52]
        assert used == list(range(52, 52 + len(used))) == [token for token in labels if token >= 52]
        assert len(labels) <= decoder and len(used) <= sentinels


def test_past_the_end_is_an_empty_row(build):
    batch = build([[[5, 6, 7]]]).batch(np.array([10**9]))

    assert not batch["loss_mask"].any() and not batch["tokens"].any()
    assert (batch["segment_ids"] == 1).all() and (batch["decoder_segment_ids"] == 1).all()
    assert {name: array.dtype.name for name, array in batch.items()} == {
        "tokens": "int32",
        "segment_ids": "int32",
        "decoder_tokens": "int32",
        "labels": "int32",
        "loss_mask": "float32",
        "decoder_segment_ids": "int32",
        "sample_ids": "uint32",
    }


def test_a_row_depends_on_nothing_but_its_number(build):
    documents = random_documents(1, 20)
    dataset, again = build(documents, num_samples=50), build(documents, num_samples=50)
    whole, order = dataset.batch(np.arange(50)), np.random.default_rng(2).permutation(50)

    for name, rows in again.batch(order).items():
        np.testing.assert_array_equal(rows, whole[name][order])


def test_decoder_starts_with_padding_where_there_is_no_beginning(build):
    tokenizer = NullTokenizer(60, extra_ids=5)
    tokenizer.pad_id = 0
    batch = build([[[5, 6, 7]]], tokenizer=tokenizer).batch(np.array([0]))

    assert batch["decoder_tokens"][0, :2].tolist() == [0, 61]
    assert batch["labels"][0, 0] == 61


@pytest.mark.parametrize(
    ("tokenizer", "message"),
    [
        (NullTokenizer(60), r"and there are none: set tokenizer\.extra_ids=100"),
        (NullTokenizer(60, extra_ids=1), "tokenizer.type null has no id for a t5 decoder to start with"),
    ],
)
def test_tokenizers_that_lack_something_are_refused(build, tokenizer, message: str):
    with pytest.raises(InputError, match=message):
        build([[[5, 6, 7]]], tokenizer=tokenizer)


def test_the_end_that_a_tokenizer_puts_behind_texts(build, tmp_path: Path):
    """Prompts of an imported T5 have it, and so have its samples; nothing else is changed."""
    documents = random_documents(5, 20)
    ended = wordpiece(tmp_path)
    ended.suffix = (EOS,)
    numbers = np.arange(8)
    plain, with_end = build(documents).batch(numbers), build(documents, tokenizer=ended).batch(numbers)
    for row in range(len(numbers)):
        length = np.count_nonzero(plain["segment_ids"][row] == 0)
        assert with_end["tokens"][row, : length + 1].tolist() == [*plain["tokens"][row, :length].tolist(), EOS]
        assert np.count_nonzero(with_end["segment_ids"][row] == 0) == length + 1
    for name in ("decoder_tokens", "labels", "loss_mask"):
        np.testing.assert_array_equal(plain[name], with_end[name])
