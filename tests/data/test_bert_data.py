"""BERT and RoBERTa samples, compared with a literal reading of their description, and properties of all samples."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from megajax.config import DataConfig, InputError
from megajax.data.bert import BertDataset
from megajax.data.indexed import Selection
from megajax.data.masking import draw_spans, geometric_length, inverse_length, masking_budget, whole_words
from megajax.data.tokenizers import NullTokenizer
from megajax.data.tokenizers.fast import FastTokenizer, bert_wordpiece

CLS, SEP, MASK = 2, 3, 4
VOCABULARY = [
    "[PAD]",
    "[UNK]",
    "[CLS]",
    "[SEP]",
    "[MASK]",
    *(f"w{i}" for i in range(30)),
    *(f"##c{i}" for i in range(15)),
]
"""Ids 5 to 34 begin a word, ids 35 to 49 go on with one; 50 is [BOS], 51 [EOS]."""


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory) -> FastTokenizer:
    path = tmp_path_factory.mktemp("tokenizer") / "vocab.txt"
    path.write_text("\n".join(VOCABULARY))
    return bert_wordpiece(path, lower_case=True)


def random_documents(rng: np.random.Generator, count: int) -> list[list[list[int]]]:
    return [
        [rng.integers(5, 50, rng.integers(1, 12)).tolist() for _ in range(rng.integers(2, 9))] for _ in range(count)
    ]


def joined(lists) -> list:
    return [item for items in lists for item in items]


@pytest.fixture
def build(write_sentences, tokenizer, tmp_path: Path):
    def build_dataset(documents, pair_task: bool = True, seed: int = 1234, **changes) -> BertDataset:
        indexed = write_sentences(documents)
        num_samples = changes.pop("num_samples", None)
        config = replace(DataConfig(seq_length=32), **changes)
        selection = Selection(indexed, np.arange(len(documents)), num_samples, seed, "train", tmp_path / "cache")
        return BertDataset(selection, config, tokenizer, pair_task)

    return build_dataset


def literal_sample(sentences, target, seed, number, mask_prob, pair_task, vocab_size):
    """Tokens, types, {place: label} and whether the parts were swapped, token by token with Python lists."""
    rng = np.random.RandomState((seed + number) % 2**32)
    pivot, swapped = len(sentences), False
    if pair_task:
        pivot = rng.randint(1, len(sentences)) if len(sentences) >= 3 else 1
        swapped = bool(rng.random_sample() < 0.5)
    a, b = joined(sentences[:pivot]), joined(sentences[pivot:])
    if swapped:
        a, b = b, a
    while len(a) + len(b) > target:
        (a if len(a) > len(b) else b).pop(0 if rng.random_sample() < 0.5 else -1)
    tokens = [CLS, *a, SEP, *([*b, SEP] if b else [])]
    types = [0] * (len(a) + 2) + ([1] * (len(b) + 1) if b else [])

    masked, labels = literal_masks(tokens, target, mask_prob, vocab_size, rng)
    return masked, types, labels, swapped


def literal_masks(tokens, target, mask_prob, vocab_size, rng):
    words = []
    for place, token in enumerate(tokens):
        if token in (CLS, SEP):
            continue
        if 35 <= token < 50 and words:
            words[-1].append(place)
        else:
            words.append([place])
    ngrams = [[joined(words[i : i + n]) for n in (1, 2, 3)] for i in range(len(words))]
    rng.shuffle(ngrams)
    odds = np.array([1, 1 / 2, 1 / 3])
    limit = min(mask_prob * target, max(1, round(mask_prob * len(tokens))))
    masked, labels = list(tokens), {}
    for choices in ngrams:
        if len(labels) >= limit:
            break
        n = rng.choice([1, 2, 3], p=odds / odds.sum())
        while n and len(labels) + len(choices[n - 1]) > limit:
            n -= 1
        if n == 0 or any(place in labels for place in choices[n - 1]):
            continue
        for place in choices[n - 1]:
            labels[place] = tokens[place]
            if rng.random_sample() < 0.8:
                masked[place] = MASK
            elif rng.random_sample() >= 0.5:
                masked[place] = rng.randint(0, vocab_size)
    return masked, labels


@pytest.mark.parametrize("pair_task", [True, False])
@pytest.mark.parametrize("mask_prob", [0.15, 0.5])
def test_equals_the_literal_description(build, tokenizer, pair_task: bool, mask_prob: float):
    documents = random_documents(np.random.default_rng(0), 40)
    flat = joined(documents)
    dataset = build(documents, pair_task, num_samples=200, mask_prob=mask_prob)
    batch = dataset.batch(np.arange(len(dataset)))

    for number, (first, stop, target) in enumerate(dataset._map.rows.tolist()):
        tokens, types, labels, swapped = literal_sample(
            flat[first:stop], target, 1234, number, mask_prob, pair_task, tokenizer.vocab_size
        )
        t = len(tokens)
        assert batch["tokens"][number].tolist() == tokens + [0] * (32 - t)
        assert batch["token_types"][number].tolist() == types + [0] * (32 - t)
        assert batch["segment_ids"][number].tolist() == [0] * t + [1] * (32 - t)
        places = batch["loss_mask"][number].nonzero()[0].tolist()
        assert {place: batch["labels"][number, place] for place in places} == labels
        assert not pair_task or batch["pair_labels"][number] == swapped


def test_shapes_and_types(build):
    batch = build([[[5, 6], [7]]]).batch(np.array([0, 0, 9]))

    assert {name: (array.shape, array.dtype.name) for name, array in batch.items()} == {
        "tokens": ((3, 32), "int32"),
        "labels": ((3, 32), "int32"),
        "loss_mask": ((3, 32), "float32"),
        "positions": ((3, 32), "int32"),
        "token_types": ((3, 32), "int32"),
        "segment_ids": ((3, 32), "int32"),
        "sample_ids": ((3,), "uint32"),
        "pair_labels": ((3,), "int32"),
    }
    assert batch["positions"][2].tolist() == list(range(32))
    assert batch["sample_ids"].tolist() == [0, 0, 9]


def test_past_the_end_is_an_empty_row(build):
    batch = build([[[5, 6], [7]]]).batch(np.array([1, 10**9]))

    assert not batch["loss_mask"].any() and not batch["tokens"].any()
    assert (batch["segment_ids"] == 1).all()
    assert batch["pair_labels"].tolist() == [-1, -1]


def test_a_row_depends_on_nothing_but_its_number(build):
    documents = random_documents(np.random.default_rng(1), 20)
    dataset, again = build(documents, num_samples=50), build(documents, num_samples=50)
    whole, order = dataset.batch(np.arange(50)), np.random.default_rng(2).permutation(50)

    for name, rows in again.batch(order).items():
        np.testing.assert_array_equal(rows, whole[name][order])
    for other in (build(documents, num_samples=50, mask_prob=0.2), build(documents, num_samples=50, seed=1)):
        assert not np.array_equal(other.batch(np.arange(50))["tokens"], whole["tokens"])


def test_roberta_has_one_part(build):
    batch = build([[[5, 6], [7, 8], [9]]], pair_task=False).batch(np.array([0]))

    assert "pair_labels" not in batch
    assert not batch["token_types"].any()
    assert (batch["tokens"][0] == SEP).sum() == 1
    assert (batch["segment_ids"][0] == 0).sum() == 7


def test_replacements_have_their_shares(build):
    """Devlin et al., section 3.1: 80 % masks, 10 % random ids, 10 % unchanged."""
    dataset = build(random_documents(np.random.default_rng(3), 100), num_samples=3000)
    batch = dataset.batch(np.arange(3000))
    picked = batch["loss_mask"] == 1
    shown, label = batch["tokens"][picked], batch["labels"][picked]

    assert picked.sum() > 5000
    assert abs((shown == MASK).mean() - 0.8) < 0.02
    assert abs((shown == label).mean() - 0.1) < 0.02
    assert abs(batch["pair_labels"].mean() - 0.5) < 0.04


def test_single_sentences_are_refused(build):
    with pytest.raises(InputError, match="needs documents with at least 2 sentences; found 0 of 2"):
        build([[[5, 6]], [[7]]], num_samples=10)
    assert len(build([[[5, 6]], [[7]]], pair_task=False, num_samples=10)) == 10


def test_tokenizer_without_a_mask_is_refused(build, tmp_path: Path, write_documents):
    with pytest.raises(InputError, match=r"tokenizer\.type null has no cls id, .*: set tokenizer\.special_ids=true"):
        BertDataset(
            Selection(write_documents([[1, 2]]), np.arange(1), None, 1, "train", tmp_path),
            DataConfig(seq_length=16),
            NullTokenizer(10),
            pair_task=False,
        )


def test_ids_of_another_tokenizer_are_refused(build):
    with pytest.raises(InputError, match="token id 99 outside the vocabulary of 52"):
        build([[[5, 99], [7]]]).batch(np.array([0]))


class TestSpans:
    @given(st.lists(st.integers(2, 49), max_size=40))
    def test_words_cover_the_text_once(self, tokens: list[int]):
        continuations = np.isin(np.arange(52), range(35, 50))
        words = whole_words(np.array(tokens, np.int64), continuations, (CLS, SEP))

        assert joined(words) == [place for place, token in enumerate(tokens) if token not in (CLS, SEP)]
        assert all(tokens[word[0]] < 35 for word in words[1:])
        assert all(tokens[place] >= 35 for word in words for place in word[1:])

    @settings(suppress_health_check=[HealthCheck.too_slow])
    @given(
        st.lists(st.integers(1, 4), max_size=30),
        st.integers(0, 2**32 - 1),
        st.floats(0.01, 0.9),
        st.sampled_from([inverse_length, geometric_length]),
    )
    def test_spans_are_disjoint_words_within_the_budget(self, sizes, seed, mask_prob, draw_length):
        starts = np.cumsum([0, *sizes]).tolist()
        words = [list(range(start, start + size)) for start, size in zip(starts, sizes, strict=False)]
        budget = masking_budget(mask_prob, starts[-1], starts[-1] + 3)
        runs = list(draw_spans(words, budget, draw_length, np.random.RandomState(seed)))
        places = joined(runs)

        assert len(places) == len(set(places)) <= max(budget, 0)
        for run in runs:
            assert run == list(range(run[0], run[-1] + 1))
            assert run[0] in starts and run[-1] + 1 in starts

    def test_lengths_have_their_distributions(self):
        rng = np.random.RandomState(0)
        counts = np.bincount([inverse_length(rng) for _ in range(20_000)], minlength=4)[1:] / 20_000
        np.testing.assert_allclose(counts, [6 / 11, 3 / 11, 2 / 11], atol=0.01)

        lengths = [geometric_length(rng) for _ in range(20_000)]
        assert max(lengths) == 10
        assert abs(np.mean(lengths) - sum(0.8**k for k in range(10))) < 0.1
