import base64
import json
import sys
from pathlib import Path

import pytest

from megajax.config import InputError, TokenizerConfig
from megajax.data.tokenizers import build_tokenizer

MERGES = [b"he", b"ll", b"hell", b"hello", b" w"]
RANKS = [bytes([byte]) for byte in range(256)] + MERGES


@pytest.fixture
def megatron_file(tmp_path: Path) -> Path:
    records = [
        {"rank": rank, "token_bytes": base64.b64encode(piece).decode(), "token_str": None}
        for rank, piece in enumerate(RANKS)
    ]
    (tmp_path / "vocab.json").write_text(json.dumps(records))
    return tmp_path / "vocab.json"


@pytest.fixture
def llama3_file(tmp_path: Path) -> Path:
    lines = [f"{base64.b64encode(piece).decode()} {rank}\n" for rank, piece in enumerate(RANKS)]
    (tmp_path / "tokenizer.model").write_text("".join(lines))
    return tmp_path / "tokenizer.model"


def test_missing_library_is_named(megatron_file: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "tiktoken", None)
    with pytest.raises(InputError, match="needs the tiktoken library: pip install tiktoken"):
        build_tokenizer(TokenizerConfig(type="tiktoken", model=str(megatron_file)))


class TestWithTheLibrary:
    @pytest.fixture(autouse=True)
    def library(self):
        pytest.importorskip("tiktoken")

    def test_megatron_file(self, megatron_file: Path):
        """Special ids come first, ranks after them (Megatron-LM's TikTokenizer)."""
        config = TokenizerConfig(type="tiktoken", model=str(megatron_file), tiktoken_special_ids=10, extra_ids=1)
        tokenizer = build_tokenizer(config)
        ids = tokenizer.encode("hello world")

        assert ids == [10 + 259, 10 + 260, *(10 + ord(letter) for letter in "orld")]
        assert tokenizer.encode_batch(["hello world", ""]) == [ids, []]
        assert tokenizer.decode([*ids, 2, 271]) == "hello world</s><extra_id_0>"
        assert (tokenizer.unk_id, tokenizer.bos_id, tokenizer.eod_id, tokenizer.mask_id) == (0, 1, 2, 3)
        assert (tokenizer.vocab_size, tokenizer.sentinel_ids) == (272, (271,))

    def test_megatron_vocabulary_can_be_cut(self, megatron_file: Path):
        config = TokenizerConfig(type="tiktoken", model=str(megatron_file), tiktoken_special_ids=10, vocab_size=267)
        tokenizer = build_tokenizer(config)

        assert tokenizer.vocab_size == 267
        assert tokenizer.encode("he") == [10 + 256]
        assert tokenizer.encode("ll") == [10 + ord("l")] * 2

    def test_llama3_file(self, llama3_file: Path):
        """Ranks come first, beginning and end after them, 256 special ids in all."""
        tokenizer = build_tokenizer(TokenizerConfig(type="tiktoken", model=str(llama3_file)))

        assert tokenizer.encode("hello") == [259]
        assert (tokenizer.bos_id, tokenizer.eod_id, tokenizer.vocab_size) == (261, 262, 261 + 256)
        assert tokenizer.decode([259, 262]) == "hello<|end_of_text|>"

    def test_literal_control_string_is_text(self, llama3_file: Path):
        tokenizer = build_tokenizer(TokenizerConfig(type="tiktoken", model=str(llama3_file)))
        ids = tokenizer.encode("a<|end_of_text|>b")

        assert max(ids) < 261
        assert tokenizer.decode(ids) == "a<|end_of_text|>b"

    def test_pattern_counts_for_the_identity(self, megatron_file: Path):
        def identity(**changes) -> dict:
            return build_tokenizer(TokenizerConfig(type="tiktoken", model=str(megatron_file), **changes)).identity

        assert identity() == identity(tiktoken_pattern="v2")
        assert identity() != identity(tiktoken_pattern="v1")
        assert identity() != identity(tiktoken_special_ids=10)

    @pytest.mark.parametrize(
        ("name", "content", "message"),
        [
            ("a.json", "{", "not a list of rank and token_bytes"),
            ("a.json", '[{"rank": 0}]', "not a list of rank and token_bytes"),
            ("a.json", '[{"rank": 0, "token_bytes": "AA=="}]', "ranks or single bytes are missing"),
            ("a.tiktoken", "AA== 0 1", 'not lines of "base64 rank"'),
            ("a.tiktoken", "AA== x", 'not lines of "base64 rank"'),
        ],
    )
    def test_other_files_are_refused(self, tmp_path: Path, name: str, content: str, message: str):
        (tmp_path / name).write_text(content)
        with pytest.raises(InputError, match=message):
            build_tokenizer(TokenizerConfig(type="tiktoken", model=str(tmp_path / name)))
