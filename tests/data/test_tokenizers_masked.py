"""Tokenizers of masked models: BERT's WordPiece, and special ids that other tokenizers lack."""

import subprocess
import sys
from pathlib import Path

import pytest

from megajax.config import InputError, TokenizerConfig
from megajax.data.tokenizers import SentencePieceTokenizer, build_tokenizer, train_sentencepiece
from megajax.data.tokenizers.fast import bert_wordpiece, train_wordpiece

PIECES = [
    "[PAD]",
    "[UNK]",
    "[CLS]",
    "[SEP]",
    "[MASK]",
    "un",
    "##aff",
    "##able",
    "zoe",
    ",",
    "Un",
    "Zo\u00eb",
    "[",
    "]",
]
TEXTS = ["hello world, hello there", "the world says hello\n\nand the other world too"]


@pytest.fixture
def vocab(tmp_path: Path) -> Path:
    path = tmp_path / "vocab.txt"
    path.write_text("\n".join(PIECES) + "\n")
    return path


class TestWordPiece:
    def test_longest_pieces_first(self, vocab: Path):
        tokenizer = bert_wordpiece(vocab, lower_case=True)

        assert tokenizer.encode("Unaffable, ZO\u00cb zzz") == [5, 6, 7, 9, 8, 1]
        assert tokenizer.encode_batch(["un", "", "zoe ,"]) == [[5], [], [8, 9]]
        assert tokenizer.decode([5, 6, 7, 9, 8]) == "unaffable, zoe"

    def test_cased(self, vocab: Path):
        assert bert_wordpiece(vocab, lower_case=False).encode("Unaffable Zo\u00eb zoe") == [10, 6, 7, 11, 8]

    def test_ids(self, vocab: Path):
        """[BOS] and [EOS] come after the vocabulary, then the sentinels (Megatron-LM's BertWordPieceTokenizer)."""
        config = TokenizerConfig(type="bert_wordpiece", vocab=str(vocab), extra_ids=2)
        tokenizer = build_tokenizer(config)

        assert (tokenizer.pad_id, tokenizer.unk_id, tokenizer.cls_id) == (0, 1, 2)
        assert (tokenizer.sep_id, tokenizer.mask_id) == (3, 4)
        assert (tokenizer.bos_id, tokenizer.eod_id, tokenizer.sentinel_ids) == (14, 15, (16, 17))
        assert tokenizer.vocab_size == 18
        assert tokenizer.continuations.nonzero()[0].tolist() == [6, 7]

    def test_text_becomes_exactly_its_tokens(self, vocab: Path):
        """No [CLS] or [SEP] around a text, and none for the literal words."""
        tokenizer = bert_wordpiece(vocab, lower_case=True, extra_ids=1)
        ids = tokenizer.encode("un [MASK] [SEP] [EOS] <extra_id_0>")

        assert not set(ids) & {0, 2, 3, 4, *range(14, 17)}
        assert ids[:4] == [5, 12, 1, 13]

    def test_identity(self, vocab: Path):
        same, cased = bert_wordpiece(vocab, lower_case=True), bert_wordpiece(vocab, lower_case=False)

        assert same.identity == bert_wordpiece(vocab, lower_case=True).identity
        assert same.identity != cased.identity
        assert same.identity != bert_wordpiece(vocab, lower_case=True, extra_ids=1).identity

    def test_other_vocabularies_are_refused(self, vocab: Path):
        vocab.write_text("\n".join(PIECES[1:4]))
        with pytest.raises(InputError, match=r"vocab\.txt: has no \[PAD\], \[MASK\]: not the vocabulary of a BERT"):
            bert_wordpiece(vocab, lower_case=True)


class TestTrainedWordPiece:
    def test_finds_words(self, tmp_path: Path):
        train_wordpiece(TEXTS, tmp_path / "sub" / "vocab.txt", 60, lower_case=True)
        tokenizer = bert_wordpiece(tmp_path / "sub" / "vocab.txt", lower_case=True)

        assert tokenizer.decode(tokenizer.encode("Hello World")) == "hello world"
        assert len(tokenizer.encode("hello world")) < 6
        assert (tokenizer.pad_id, tokenizer.mask_id) == (0, 4)
        assert tokenizer.vocab_size <= 62

    def test_needs_room_for_the_letters(self, tmp_path: Path):
        with pytest.raises(InputError, match=r"vocab_size 20: this text has \d+ letters and special pieces"):
            train_wordpiece(TEXTS, tmp_path / "vocab.txt", 20, lower_case=True)

    def test_is_deterministic(self, tmp_path: Path):
        """Also from one process to the next, whose hash tables differ."""
        train_wordpiece(TEXTS, tmp_path / "a.txt", 60, lower_case=True)
        script = (
            "import sys; from megajax.data.tokenizers.fast import train_wordpiece; "
            "train_wordpiece(sys.argv[2:], sys.argv[1], 60, lower_case=True)"
        )
        subprocess.run([sys.executable, "-c", script, str(tmp_path / "b.txt"), *TEXTS], check=True)

        assert (tmp_path / "a.txt").read_text() == (tmp_path / "b.txt").read_text()


@pytest.fixture(scope="module")
def pieces(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("tokenizer") / "tiny.model"
    train_sentencepiece(TEXTS, path, vocab_size=290)
    return path


class TestSentencePieceWithSpecialIds:
    def test_come_after_the_vocabulary(self, pieces: Path):
        """In the order of Megatron-LM's SentencePieceTokenizer, which skips what the model has (bos 1, eos 2)."""
        tokenizer = SentencePieceTokenizer(pieces, special_ids=True, extra_ids=2)

        assert (tokenizer.cls_id, tokenizer.sep_id, tokenizer.eod_id, tokenizer.mask_id) == (290, 291, 292, 293)
        assert (tokenizer.pad_id, tokenizer.bos_id, tokenizer.sentinel_ids) == (294, 1, (295, 296))
        assert tokenizer.vocab_size == 297

    def test_change_nothing_else(self, pieces: Path):
        plain, special = SentencePieceTokenizer(pieces), SentencePieceTokenizer(pieces, special_ids=True)
        text = "hello <CLS> world"

        assert plain.encode(text) == special.encode(text)
        assert special.encode_batch([text, ""]) == [plain.encode(text), []]
        assert (plain.vocab_size, plain.eod_id, plain.mask_id, plain.sentinel_ids) == (290, 2, None, ())
        assert plain.identity != special.identity
        assert not special.continuations.any()

    def test_decode_by_their_name(self, pieces: Path):
        tokenizer = SentencePieceTokenizer(pieces, special_ids=True, extra_ids=1)
        hello, world = tokenizer.encode("hello"), tokenizer.encode(" world")

        assert tokenizer.decode([290, *hello, 295, *world, 293, 291]) == "<CLS>hello<extra_id_0> world<MASK><SEP>"
