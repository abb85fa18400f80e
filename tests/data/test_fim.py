import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megajax.config import DataConfig, InputError
from megajax.data.fim import FillInTheMiddle
from megajax.data.gpt import GPTDataset
from megajax.data.indexed import Selection
from megajax.data.tokenizers import NullTokenizer, SentencePieceTokenizer, train_sentencepiece
from megajax.data.tokenizers.tokenizer import Tokenizer

PREFIX, MIDDLE, SUFFIX, EOD = 256, 257, 258, 259


class Bytes(Tokenizer):
    """One id per byte, and four special ones."""

    vocab_size, eod_id = 260, EOD
    identity = {"type": "bytes", "vocab_size": 260}  # noqa: RUF012

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def encode_batch(self, texts) -> list[list[int]]:
        return [self.encode(text) for text in texts]

    def decode(self, ids) -> str:
        return bytes(ids).decode(errors="replace")

    def id_of(self, name: str) -> int | None:
        return {"<fim_prefix>": PREFIX, "<fim_middle>": MIDDLE, "<fim_suffix>": SUFFIX}.get(name)


def fim(rate: float, spm_rate: float, seed: int = 1) -> FillInTheMiddle:
    return FillInTheMiddle(DataConfig(fim_rate=rate, fim_spm_rate=spm_rate), Bytes(), seed)


def tokens_of(*documents: str) -> np.ndarray:
    """Documents with an end between them; the last one goes on after the sample."""
    return np.array([token for text in documents for token in (*text.encode(), EOD)][:-1], np.int32)


def filled_in(document: list[int]) -> str:
    """The text that a rearranged document was made of."""
    marks = sorted((document.index(mark), mark) for mark in (PREFIX, MIDDLE, SUFFIX))
    ends = [place for place, _ in marks[1:]] + [len(document)]
    parts = {mark: bytes(document[place + 1 : end]).decode() for (place, mark), end in zip(marks, ends, strict=True)}
    if marks[1][0] == 1:  # suffix first: the middle mark stands before prefix and middle together
        return parts[MIDDLE] + parts[SUFFIX]
    return parts[PREFIX] + parts[MIDDLE] + parts[SUFFIX]


def documents_of(tokens: np.ndarray) -> list[list[int]]:
    return [part[part != EOD].tolist() for part in np.split(tokens, np.flatnonzero(tokens == EOD) + 1)]


@pytest.mark.parametrize(("spm_rate", "order"), [(0, [PREFIX, SUFFIX, MIDDLE]), (1, [PREFIX, SUFFIX, MIDDLE])])
def test_every_document_is_rearranged(spm_rate: float, order: list[int]):
    """PSM: prefix mark, prefix, suffix mark, suffix, ...; SPM: both marks, suffix, middle mark, prefix, middle."""
    rearranged = fim(1, spm_rate).rearranged(tokens_of("hello world", "", "äöü and more"), sample=3)
    first, empty, last = documents_of(rearranged)

    for document, text in ((first, "hello world"), (last, "äöü and more")):
        assert [token for token in document if token in order] == order
        assert (document[:2] == [PREFIX, SUFFIX]) >= bool(spm_rate)
        assert filled_in(document) == text
    assert empty == []


@given(st.lists(st.text(max_size=20), min_size=1, max_size=5), st.integers(0, 2**31), st.sampled_from([0.0, 0.5, 1.0]))
def test_no_text_is_lost(texts: list[str], sample: int, spm_rate: float):
    rearranged = fim(1, spm_rate).rearranged(tokens_of(*texts), sample)
    unreadable = [text for text in texts if "\ufffd" in text]

    found = [
        filled_in(document) if PREFIX in document else bytes(document).decode() for document in documents_of(rearranged)
    ]
    assert found == texts
    assert sum(PREFIX in document for document in documents_of(rearranged)) == len([*filter(None, texts)]) - len(
        unreadable
    )


def test_rates():
    texts = [f"document {i}" for i in range(2000)]
    documents = documents_of(fim(0.5, 0.25).rearranged(tokens_of(*texts), sample=0))
    rearranged = [document for document in documents if PREFIX in document]
    suffix_first = [document for document in rearranged if document[:2] == [PREFIX, SUFFIX]]

    assert len(rearranged) / 2000 == pytest.approx(0.5, abs=0.04)
    # an empty prefix looks the same, which happens once in 7 times
    assert len(suffix_first) / len(rearranged) == pytest.approx(0.25 + 0.75 * 2 / 13, abs=0.06)


def test_a_sample_does_not_depend_on_what_was_read_before(write_documents, tmp_path):
    write = write_documents([[*f"this is document number {i}".encode(), EOD] for i in range(40)])
    config = DataConfig(seq_length=48, fim_rate=0.5)
    selection = Selection(write, np.arange(40, dtype=np.int32), None, 1, "train", tmp_path / "cache")
    data = GPTDataset(selection, config, Bytes())
    together = data.batch(np.arange(8))

    for i in (5, 0, 7):
        alone = data.batch(np.array([i]))
        assert all(np.array_equal(alone[name][0], together[name][i]) for name in alone)
    assert (together["tokens"] == PREFIX).any()
    # what does not fit is cut off, what is missing carries no loss
    assert together["loss_mask"].sum(axis=1).min() >= 47


def test_a_tokenizer_without_the_special_tokens_is_refused():
    """The line says which are missing, and what can be done."""
    missing = r"no token <fim_prefix>, <fim_middle>, <fim_suffix> or <\|fim_prefix\|>, .*: name three .*fim_tokens"
    with pytest.raises(InputError, match=missing):
        FillInTheMiddle(DataConfig(fim_rate=0.5), NullTokenizer(9), 1)


def test_tokens_of_other_names(tmp_path: Path):
    """Unused tokens of a vocabulary will do, or such as are added to it."""
    train_sentencepiece(["hello world"], tmp_path / "tokenizer.model", 270)
    added = {"<PRE>": 270, "<MID>": 271, "<SUF>": 272}
    (tmp_path / "added_tokens.json").write_text(json.dumps(added))
    tokenizer = SentencePieceTokenizer(tmp_path / "tokenizer.model")
    config = DataConfig(fim_rate=1, fim_tokens=("<PRE>", "<MID>", "<SUF>"))
    made = FillInTheMiddle(config, tokenizer, 1).rearranged(np.array(tokenizer.encode("hello world")), 0).tolist()
    assert [token for token in made if token >= 270] == [270, 272, 271]
    with pytest.raises(InputError, match="no token <MIDDLE>: name three"):
        FillInTheMiddle(DataConfig(fim_rate=1, fim_tokens=("<PRE>", "<MIDDLE>", "<SUF>")), tokenizer, 1)
    with pytest.raises(InputError, match="fim_tokens has 2 names"):
        FillInTheMiddle(DataConfig(fim_rate=1, fim_tokens=("<PRE>", "<SUF>")), tokenizer, 1)


def test_the_beginning_stays_where_it_is():
    """A beginning of sequence is no part of the text that is cut."""
    tokenizer = Bytes()
    tokenizer.prefix = (7,)
    tokens = np.array([7, *b"hello world", EOD, 7, *b"and more"], np.int32)
    made = FillInTheMiddle(DataConfig(fim_rate=1), tokenizer, 1).rearranged(tokens, 3)
    documents = documents_of(made)
    assert [document[:2] for document in documents] == [[7, PREFIX], [7, PREFIX]]
    assert [filled_in(document[1:]) for document in documents] == ["hello world", "and more"]
