"""Conversations as text, as token files, and packed into rows."""

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megajax.config import Config, DataConfig, InputError, check_config
from megajax.corpus.chat import render
from megajax.corpus.conversations import write_conversations
from megajax.data.indexed import IndexedDataset, Selection
from megajax.data.instruction import InstructionDataset, best_fit, pack
from megajax.data.tokenizers import NullTokenizer, SentencePieceTokenizer, train_sentencepiece

EOD = 99


def test_kind_goes_with_the_family():
    check_config(Config(data=DataConfig(kind="instruction")))
    with pytest.raises(InputError, match=r"data\.kind bert does not go with model\.family gpt: use auto or gpt or"):
        check_config(Config(data=DataConfig(kind="bert")))


def said(*pairs: str) -> list[dict[str, str]]:
    """Messages of "role: content" words."""
    return [dict(zip(("role", "content"), pair.split(": "), strict=True)) for pair in pairs]


class TestTemplate:
    def test_given_and_answers_in_turn(self):
        messages = said("system: Be brief.", "user: Hi", "assistant: Ho", "user: 1+1?", "assistant: 2", "user: Thanks")

        assert render(messages) == [
            "<|system|>\nBe brief.\n<|user|>\nHi\n<|assistant|>\n",
            "Ho",
            "<|user|>\n1+1?\n<|assistant|>\n",
            "2",
        ]

    @pytest.mark.parametrize(
        ("messages", "message"),
        [
            ([], "no message of the assistant"),
            (said("user: Hi"), "no message of the assistant"),
            (said("human: Hi"), "message 1 needs .* under role one of system, user, assistant, tool"),
            ([*said("user: Hi"), {"role": "assistant"}], "message 2 needs a text under content"),
            (["Hi"], "message 1 needs"),
            (said("user: \ud800"), "message 1 needs a text"),
            (said("user: Hi")[0], "message 1 needs"),
        ],
    )
    def test_other_messages_are_refused(self, messages: list, message: str):
        with pytest.raises(InputError, match=message):
            render(messages)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory) -> SentencePieceTokenizer:
    path = tmp_path_factory.mktemp("tokenizer") / "tiny.model"
    train_sentencepiece(["<|user|> hello <|assistant|> hello there"], path, vocab_size=285)
    return SentencePieceTokenizer(path)


class TestTokenFile:
    def write(self, folder: Path, *records: object) -> Path:
        path = folder / "chat.jsonl"
        path.write_text("\n".join(json.dumps(record) for record in records))
        return path

    def test_turns_are_sequences(self, tmp_path: Path, tokenizer):
        messages = said("user: Hi", "assistant: Ho", "user: 1+1?", "assistant: 2")
        path = self.write(tmp_path, {"messages": messages}, {"messages": messages[:2]})
        assert write_conversations([path], tmp_path / "chat", tokenizer) == 2
        indexed = IndexedDataset(tmp_path / "chat")

        assert indexed.document_index.tolist() == [0, 4, 6]
        assert [tokenizer.decode(indexed[i].tolist()) for i in range(4)] == render(messages)
        assert [int(indexed[i][-1]) == tokenizer.eod_id for i in range(4)] == [False, True, False, True]

    @pytest.mark.parametrize("record", [{"text": "Hi"}, ["Hi"], {"messages": "Hi"}])
    def test_bad_records_are_named(self, tmp_path: Path, tokenizer, record: object):
        path = self.write(tmp_path, {"messages": said("user: Hi", "assistant: Ho")}, record)
        with pytest.raises(InputError, match=r"chat\.jsonl:2: no list of messages"):
            write_conversations([path], tmp_path / "chat", tokenizer)
        assert list(tmp_path.iterdir()) == [path]

    def test_nothing_is_refused(self, tmp_path: Path, tokenizer):
        (tmp_path / "chat.jsonl").write_text("\n")
        with pytest.raises(InputError, match=r"chat\.jsonl: no conversations"):
            write_conversations([tmp_path / "chat.jsonl"], tmp_path / "chat", tokenizer)


@pytest.fixture
def build(write_sentences, tmp_path: Path):
    def build_dataset(conversations, seq_length: int = 8, num_samples=None, seed: int = 1) -> InstructionDataset:
        indexed = write_sentences(conversations)
        indices = np.arange(len(conversations))
        selection = Selection(indexed, indices, num_samples, seed, "train", tmp_path / "cache")
        return InstructionDataset(selection, DataConfig(seq_length=seq_length), NullTokenizer(EOD))

    return build_dataset


class TestRows:
    def test_one_conversation(self, build):
        """Labels are the next tokens; the loss counts where these belong to an answer."""
        batch = build([[[1, 2], [3, EOD], [4], [5, EOD]]], seq_length=9).batch(np.array([0]))

        assert batch["tokens"].tolist() == [[1, 2, 3, EOD, 4, 5, 0, 0, 0]]
        assert batch["labels"].tolist() == [[2, 3, EOD, 4, 5, EOD, 0, 0, 0]]
        assert batch["loss_mask"].tolist() == [[0, 1, 1, 0, 1, 1, 0, 0, 0]]
        assert batch["positions"].tolist() == [[0, 1, 2, 3, 4, 5, 0, 0, 0]]
        assert batch["segment_ids"].tolist() == [[0, 0, 0, 0, 0, 0, 1, 1, 1]]
        assert {name: array.dtype.name for name, array in batch.items()} == {
            "tokens": "int32",
            "labels": "int32",
            "positions": "int32",
            "segment_ids": "int32",
            "loss_mask": "float32",
            "sample_ids": "uint32",
        }

    def test_several_conversations_share_a_row(self, build):
        batch = build([[[1], [2, EOD]], [[3], [4, 5, EOD]]]).batch(np.array([0, 7]))
        tokens, segments = batch["tokens"].tolist(), batch["segment_ids"].tolist()

        assert tokens[0] in ([1, 2, 3, 4, 5, 0, 0, 0], [3, 4, 5, 1, 2, 0, 0, 0])
        assert batch["positions"][0].tolist() in ([0, 1, 0, 1, 2, 0, 0, 0], [0, 1, 2, 0, 1, 0, 0, 0])
        assert segments[0] in ([0, 0, 1, 1, 1, 2, 2, 2], [0, 0, 0, 1, 1, 2, 2, 2])
        assert batch["loss_mask"].sum(axis=1).tolist() == [5, 0]
        assert tokens[1] == [0] * 8

    def test_every_conversation_once_an_epoch(self, build):
        rng = np.random.default_rng(0)
        conversations = [[[i + 1], [50] * int(rng.integers(0, 6)) + [EOD]] for i in range(40)]
        dataset = build(conversations)
        batch = dataset.batch(np.arange(len(dataset)))
        firsts = batch["tokens"][(batch["positions"] == 0) & (batch["tokens"] > 0)]

        assert sorted(firsts.tolist()) == list(range(1, 41))
        assert batch["loss_mask"].sum() == sum(len(answer) for _, answer in conversations)
        assert (dataset.epochs, build(conversations, num_samples=len(dataset) + 1).epochs) == (1, 2)

    def test_a_row_depends_on_nothing_but_its_number(self, build):
        conversations = [[[i + 1], [50] * (i % 5) + [EOD]] for i in range(30)]
        dataset, again = build(conversations, num_samples=50), build(conversations, num_samples=50)
        whole = dataset.batch(np.arange(50))

        for name, rows in again.batch(np.array([49, 3])).items():
            np.testing.assert_array_equal(rows, whole[name][[49, 3]])
        assert dataset.fingerprint == again.fingerprint != build(conversations, seed=2).fingerprint

    def test_long_conversations_are_cut_and_counted(self, build, caplog):
        """The first loses its second answer, the third has none within a row and is left out."""
        dataset = build([[[1, 2], [3, EOD], [4], [5, 6, EOD]], [[7], [EOD]], [[8] * 5, [9]]], seq_length=4)
        batch = dataset.batch(np.arange(len(dataset)))

        assert sorted(batch["tokens"].tolist()) == [[1, 2, 3, EOD], [7, 0, 0, 0]]
        assert "of 3 conversations 1 lose their end to data.seq_length 4, 1 are left out" in caplog.text

    def test_nothing_to_learn_is_refused(self, build):
        with pytest.raises(InputError, match="has 1 conversations but no answer within data"):
            build([[[8] * 5, [9]]], seq_length=4)

    def test_other_files_are_refused(self, build):
        with pytest.raises(InputError, match=r"not made from conversations: give the records as data\.text"):
            build([[[1, 2, 3]]])

    def test_ids_of_another_tokenizer_are_refused(self, build):
        with pytest.raises(InputError, match="token id 500 outside the vocabulary of 100"):
            build([[[500], [EOD]]]).batch(np.array([0]))


class TestPacking:
    @given(st.lists(st.integers(1, 16), max_size=60))
    def test_equals_the_literal_search(self, sizes: list[int]):
        free: list[list[int]] = []  # [room, when last used]
        rows = []
        for time, size in enumerate(sizes):
            fits = [row for row, (room, _) in enumerate(free) if room >= size]
            if not fits:
                fits = [len(free)]
                free.append([16, time])
            row = min(fits, key=lambda row: (free[row][0], -free[row][1]))
            free[row] = [free[row][0] - size, time]
            rows.append(row)

        assert best_fit(np.array(sizes, np.int64), 16).tolist() == rows

    @given(st.lists(st.integers(1, 16), min_size=1, max_size=60), st.sampled_from([None, 1, 40]), st.integers(0, 99))
    def test_rows_hold_every_conversation_and_no_more_than_fits(self, sizes, num_samples, seed):
        conversations, ends = pack(np.array(sizes), 16, num_samples, seed)
        epochs = len(conversations) // len(sizes)

        assert (np.bincount(conversations, minlength=len(sizes)) == epochs).all()
        assert len(ends) - 1 >= (num_samples or 1)
        assert epochs == 1 or num_samples is not None
        assert (np.add.reduceat(np.array(sizes)[conversations], ends[:-1]) <= 16).all()

    def test_little_room_is_left(self):
        """Lengths of a log-normal, as chats have them."""
        rng = np.random.default_rng(0)
        sizes = np.clip(rng.lognormal(5.5, 0.8, 20_000), 20, 2048).astype(int)
        rows = best_fit(sizes, 2048)

        assert sizes.sum() / (2048 * (rows.max() + 1)) > 0.99
