import io
import json
from pathlib import Path

import pytest
import sentencepiece
import tokenizers
from hypothesis import given
from hypothesis import strategies as st

from megajax.config import InputError, TokenizerConfig
from megajax.data.tokenizers import SentencePieceTokenizer, build_tokenizer, train_sentencepiece

TEXTS = ["hello world, hello there", "the world says hello\n\nand the other world too"]
GPT2_FILES = Path(__file__).parents[3] / "shared" / "data" / "gpt2"


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> SentencePieceTokenizer:
    path = tmp_path_factory.mktemp("tokenizer") / "tiny.model"
    train_sentencepiece(TEXTS, path, vocab_size=290)
    return SentencePieceTokenizer(path)


def toy_sentencepiece(path: Path, byte_fallback: bool) -> SentencePieceTokenizer:
    """A model of the single word "hello", with SentencePiece's own defaults otherwise."""
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(["hello"]),
        model_writer=model,
        model_type="bpe",
        vocab_size=3 + 256 * byte_fallback + len("_hello") - 1 + 5,  # control, bytes, letters, merges
        byte_fallback=byte_fallback,
        minloglevel=2,
    )
    path.write_bytes(model.getvalue())
    return SentencePieceTokenizer(path)


class TestNull:
    tokenizer = build_tokenizer(TokenizerConfig(type="null", vocab_size=100))

    def test_text_is_ids(self):
        assert self.tokenizer.encode(" 3 1\n99") == [3, 1, 99]
        assert self.tokenizer.decode([3, 1, 100]) == "3 1 100"
        assert (self.tokenizer.vocab_size, self.tokenizer.eod_id) == (101, 100)
        assert self.tokenizer.identity == {"type": "null", "vocab_size": 101}

    @pytest.mark.parametrize(("text", "message"), [("1 a", "integers between spaces"), ("100", "100 is not below")])
    def test_other_text_is_refused(self, text: str, message: str):
        with pytest.raises(InputError, match=message):
            self.tokenizer.encode(text)


class TestSentencePiece:
    @given(st.text().filter(lambda text: "\u2581" not in text))
    def test_trained_tokenizer_loses_nothing(self, trained, text: str):
        assert trained.decode(trained.encode(text)) == text

    def test_trained_tokenizer_finds_words(self, trained):
        assert len(trained.encode("hello world")) < len("hello world") / 2
        assert (trained.vocab_size, trained.unk_id, trained.bos_id, trained.eod_id, trained.pad_id) == (
            290,
            0,
            1,
            2,
            None,
        )

    def test_training_is_deterministic(self, trained, tmp_path: Path):
        train_sentencepiece(iter(TEXTS), tmp_path / "sub" / "again.model", vocab_size=290)
        again = SentencePieceTokenizer(tmp_path / "sub" / "again.model")

        assert again.identity == trained.identity
        train_sentencepiece(TEXTS, tmp_path / "other.model", vocab_size=291)
        assert SentencePieceTokenizer(tmp_path / "other.model").identity != trained.identity

    @pytest.mark.parametrize(
        ("texts", "size", "message"),
        [([], 300, "there is none"), (TEXTS, 200, "smaller than"), (TEXTS, 9000, "too high")],
    )
    def test_training_that_cannot_work_leaves_no_file(self, tmp_path: Path, texts, size: int, message: str):
        with pytest.raises(InputError, match=rf"tokenizer\.vocab_size {size}: .*{message}"):
            train_sentencepiece(texts, tmp_path / "a.model", size)
        assert list(tmp_path.iterdir()) == []

    def test_bytes_stand_in_for_unknown_text(self, tmp_path: Path):
        """Pieces _hello, _, <0xF0>, <0x9F>, <0xA4>, <0x97>; a byte piece decodes to its byte."""
        tokenizer = toy_sentencepiece(tmp_path / "toy.model", byte_fallback=True)
        text = "hello \U0001f917"
        ids = tokenizer.encode(text)
        first_byte_id = 3

        assert len(ids) == 6
        assert [i - first_byte_id for i in ids[2:]] == [0xF0, 0x9F, 0xA4, 0x97]
        assert tokenizer.decode(ids) == text
        assert tokenizer.decode([first_byte_id + 0x0A]) == "\n"

    def test_without_bytes_text_is_unknown(self, tmp_path: Path):
        tokenizer = toy_sentencepiece(tmp_path / "toy.model", byte_fallback=False)
        ids = tokenizer.encode("hello \U0001f917")

        assert ids[-1] == tokenizer.unk_id
        assert tokenizer.decode(ids) == "hello  \u2047 "

    def test_other_files_are_refused(self, tmp_path: Path):
        (tmp_path / "a.model").write_bytes(b"no model")
        with pytest.raises(InputError, match=r"a\.model: not a SentencePiece model"):
            SentencePieceTokenizer(tmp_path / "a.model")


@pytest.fixture
def bpe_files(tmp_path: Path) -> dict[str, str]:
    """A tiny byte-level BPE in GPT-2's form."""
    tiny = tokenizers.ByteLevelBPETokenizer()
    tiny.train_from_iterator(TEXTS, vocab_size=280, show_progress=False, special_tokens=["<|endoftext|>"])
    vocab, merges = tiny.save_model(str(tmp_path))
    return {"vocab": vocab, "merges": merges}


class TestGPT2:
    def test_literal_control_string_is_text(self, bpe_files):
        tokenizer = build_tokenizer(TokenizerConfig(type="gpt2_bpe", **bpe_files))
        text = "a<|endoftext|>b \u00e9\U0001f917\r\n"
        ids = tokenizer.encode(text)

        assert tokenizer.eod_id == 0
        assert tokenizer.eod_id not in ids
        assert tokenizer.decode(ids) == text
        assert tokenizer.decode([tokenizer.eod_id]) == "<|endoftext|>"
        assert tokenizer.vocab_size == len(json.loads(Path(bpe_files["vocab"]).read_text()))

    def test_real_files(self):
        if not GPT2_FILES.is_dir():
            pytest.skip(f"the GPT-2 vocabulary is not in {GPT2_FILES}")
        files = {"vocab": str(GPT2_FILES / "vocab.json"), "merges": str(GPT2_FILES / "merges.txt")}
        tokenizer = build_tokenizer(TokenizerConfig(type="gpt2_bpe", **files))

        assert (tokenizer.vocab_size, tokenizer.eod_id) == (50257, 50256)
        assert tokenizer.encode("Hello world") == [15496, 995]
        assert tokenizer.encode("<|endoftext|>") == [27, 91, 437, 1659, 5239, 91, 29]
        assert tokenizer.decode([15496, 995, 50256]) == "Hello world<|endoftext|>"

    def test_vocabulary_without_an_end_is_refused(self, tmp_path: Path):
        (tmp_path / "vocab.json").write_text('{"a": 0, "b": 1}')
        (tmp_path / "merges.txt").write_text("#version: 0.2\n")
        config = TokenizerConfig(
            type="gpt2_bpe", vocab=str(tmp_path / "vocab.json"), merges=str(tmp_path / "merges.txt")
        )
        with pytest.raises(InputError, match=r"vocab\.json: has no <\|endoftext\|>"):
            build_tokenizer(config)


@pytest.fixture
def tokenizer_json(tmp_path: Path) -> Path:
    """A tokenizer.json that adds BOS and EOS, cuts texts at 6 tokens and pads them to 8."""
    tokenizer = tokenizers.ByteLevelBPETokenizer()
    tokenizer.train_from_iterator(TEXTS, 270, show_progress=False, special_tokens=["<unk>", "<s>", "</s>", "<pad>"])
    tokenizer.post_processor = tokenizers.processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", 1), ("</s>", 2)]
    )
    tokenizer.enable_truncation(6)
    tokenizer.enable_padding(length=8, pad_id=3, pad_token="<pad>")
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    return tmp_path / "tokenizer.json"


class TestHuggingFace:
    def test_text_becomes_exactly_its_tokens(self, tokenizer_json: Path):
        """Neither BOS nor EOS from the file's own template, nor its truncation and padding."""
        tokenizer = build_tokenizer(TokenizerConfig(type="huggingface", model=str(tokenizer_json)))

        for text in ("hello", "hello world " * 50):
            assert not {1, 2, 3} & set(tokenizer.encode(text))
            assert tokenizer.decode(tokenizer.encode(text)) == text
        assert (tokenizer.eod_id, tokenizer.vocab_size) == (2, 270)
        assert (tokenizer.bos_id, tokenizer.pad_id, tokenizer.unk_id) == (None, None, None)

    def test_literal_control_string_is_text(self, tokenizer_json: Path):
        tokenizer = build_tokenizer(TokenizerConfig(type="huggingface", model=str(tokenizer_json)))
        ids = tokenizer.encode("hello</s> <s>")

        assert not {1, 2, 3} & set(ids)
        assert tokenizer.decode(ids) == "hello</s> <s>"
        assert tokenizer.decode([2]) == "</s>"

    def test_config_beside_names_the_special_tokens(self, tokenizer_json: Path):
        names = {"eos_token": {"content": "<pad>"}, "bos_token": "<s>", "unk_token": "<unk>", "pad_token": None}
        tokenizer_json.with_name("tokenizer_config.json").write_text(json.dumps(names))
        tokenizer = build_tokenizer(TokenizerConfig(type="huggingface", model=str(tokenizer_json)))

        assert (tokenizer.eod_id, tokenizer.bos_id, tokenizer.pad_id, tokenizer.unk_id) == (3, 1, None, 0)

    def test_end_that_the_vocabulary_lacks_is_refused(self, tokenizer_json: Path):
        tokenizer_json.with_name("tokenizer_config.json").write_text('{"eos_token": "<end>"}')
        with pytest.raises(InputError, match=r"tokenizer\.json: has no <end>; set eos_token"):
            build_tokenizer(TokenizerConfig(type="huggingface", model=str(tokenizer_json)))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"type": "null"}, r"tokenizer\.vocab_size is not set"),
        ({"type": "sentencepiece"}, r"tokenizer\.type sentencepiece needs a file: set tokenizer\.model"),
        ({"type": "sentencepiece", "vocab_size": 9}, r"tokenizer\.model is not set"),
        ({"type": "gpt2_bpe", "vocab": __file__}, r"tokenizer\.type gpt2_bpe needs a file: set tokenizer\.merges"),
        ({"type": "huggingface", "model": "nowhere.json"}, r"nowhere\.json: no such file \(tokenizer\.model\)"),
        ({"type": "huggingface", "model": __file__}, r"test_tokenizers\.py: not a tokenizer\.json"),
        ({"type": "gpt2_bpe", "vocab": __file__, "merges": __file__}, "not a GPT-2 vocabulary and merges"),
    ],
)
def test_unusable_settings_are_named(settings: dict, message: str):
    with pytest.raises(InputError, match=message):
        build_tokenizer(TokenizerConfig(**settings))


def test_a_word_that_nothing_stands_for(tmp_path: Path):
    """A vocabulary of words without one for unknown ones; the library's own error ends in a traceback."""
    vocabulary = {"<|endoftext|>": 0, "a": 1}
    tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary)).save(str(tmp_path / "tokenizer.json"))
    tokenizer = build_tokenizer(TokenizerConfig(type="huggingface", model=str(tmp_path / "tokenizer.json")))
    assert tokenizer.encode("a") == tokenizer.encode_marked("a") == [1]
    for read in (tokenizer.encode, tokenizer.encode_marked, lambda text: tokenizer.encode_batch([text])):
        with pytest.raises(InputError, match=r"the tokenizer cannot read a text \(WordLevel error: Missing"):
            read("b")
