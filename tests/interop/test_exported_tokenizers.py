"""Tokenizers of every kind, exported, have the same ids, text and special tokens in transformers."""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import sentencepiece
import tokenizers
from tokenizers import normalizers, pre_tokenizers

from megajax.checkpoint.store import Checkpoints
from megajax.config import CheckpointConfig, TokenizerConfig, dump_config, load_config
from megajax.corpus.chat import Chat
from megajax.data.tokenizers import Tokenizer, build_tokenizer, train_sentencepiece
from megajax.data.tokenizers.fast import train_wordpiece
from megajax.interop.hf.tokenizers import PROBES, write_tokenizer
from megajax.interop.hf.transfer import export_model
from tests.interop.imports import trained

pytestmark = pytest.mark.needs("transformers")

TEXTS = [
    "The king said hello to the world, and the other world said hello to the king; so they went on and on.",
    "def f(x):\n    return  x + 1234567  # two  spaces\n\n\tA tab, 3.14 and (brackets) [more] {still} \"quoted\" 'it'",
    "Grüße aus Ångström. Русский текст. 日本語のテキスト。 中文，文本 العربية हिन्दी",
    "aa aaa aaaa aaaaa the the the them then there theatre; unaffable unable affable",
]


def pieces(path: Path, **options: Any) -> str:
    model = io.BytesIO()
    defaults = {"vocab_size": 300, "hard_vocab_limit": False, "minloglevel": 2, "num_threads": 1}
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(TEXTS * 3), model_writer=model, **defaults | options
    )
    path.write_bytes(model.getvalue())
    return str(path)


def llama(path: Path) -> TokenizerConfig:
    """As LLaMA 2's: bytes for what is unknown, a space in front, nothing else changed."""
    options = {"model_type": "bpe", "byte_fallback": True, "normalization_rule_name": "identity", "vocab_size": 480}
    file = pieces(path / "tokenizer.model", remove_extra_whitespaces=False, **options)
    return TokenizerConfig(type="sentencepiece", model=file)


def t5(path: Path) -> TokenizerConfig:
    """As T5's: likeliest pieces, NFKC, single spaces; no piece for a "<"; sentinels behind."""
    file = pieces(path / "spiece.model", model_type="unigram", pad_id=0, eos_id=1, unk_id=2, bos_id=-1)
    return TokenizerConfig(type="sentencepiece", model=file, extra_ids=10)


def megatron(path: Path) -> TokenizerConfig:
    """With Megatron-LM's special ids behind, and symbols that the user defined."""
    options = {"model_type": "bpe", "byte_fallback": True, "vocab_size": 480, "add_dummy_prefix": False}
    file = pieces(path / "m.model", user_defined_symbols=["<sep>", "[INST]"], **options)
    return TokenizerConfig(type="sentencepiece", model=file, special_ids=True, extra_ids=3)


def unigram_with_bytes(path: Path) -> TokenizerConfig:
    file = pieces(path / "u.model", model_type="unigram", byte_fallback=True, vocab_size=480, split_by_whitespace=False)
    return TokenizerConfig(type="sentencepiece", model=file)


def quickstart(path: Path) -> TokenizerConfig:
    train_sentencepiece(TEXTS, path / "tokenizer.model", 600)
    return TokenizerConfig(type="sentencepiece", model=str(path / "tokenizer.model"))


def byte_level(path: Path) -> tokenizers.Tokenizer:
    made = tokenizers.ByteLevelBPETokenizer()
    made.train_from_iterator(TEXTS, vocab_size=400, show_progress=False, special_tokens=["<|endoftext|>"])
    made.save_model(str(path))
    return made


def gpt2(path: Path) -> TokenizerConfig:
    """Whatever the files are called."""
    byte_level(path)
    vocab, merges = path / "gpt2-vocab.json", path / "gpt2-merges.txt"
    (path / "vocab.json").rename(vocab)
    (path / "merges.txt").rename(merges)
    return TokenizerConfig(type="gpt2_bpe", vocab=str(vocab), merges=str(merges))


def tok_json(path: Path) -> TokenizerConfig:
    """NFC, digits apart, a token put before texts that training does not have; the file has another name."""
    inner = tokenizers.Tokenizer.from_str(byte_level(path)._tokenizer.to_str())
    inner.normalizer = normalizers.NFC()
    inner.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    inner.add_special_tokens(["<|im_start|>", "<fim_prefix>"])
    inner.enable_truncation(5)
    inner.enable_padding(length=9)
    inner.save(str(path / "tok.json"))
    return TokenizerConfig(type="huggingface", model=str(path / "tok.json"))


def wordpiece(path: Path, lower_case: bool) -> TokenizerConfig:
    train_wordpiece(TEXTS, path / "vocab.txt", 300, lower_case)
    return TokenizerConfig(type="bert_wordpiece", vocab=str(path / "vocab.txt"), lower_case=lower_case)


def uncased(path: Path) -> TokenizerConfig:
    return wordpiece(path, lower_case=True)


def cased(path: Path) -> TokenizerConfig:
    return wordpiece(path, lower_case=False)


def ranks() -> list[bytes]:
    """Byte pairs that a byte-level BPE learnt, in the order of their merging."""
    inner = tokenizers.ByteLevelBPETokenizer()
    inner.train_from_iterator(TEXTS, vocab_size=500, show_progress=False)
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    byte = dict(zip(map(chr, printable), printable, strict=True))
    byte |= {chr(256 + n): b for n, b in enumerate(b for b in range(256) if b not in printable)}
    learnt = inner.get_vocab()
    return [bytes(byte[letter] for letter in piece) for piece in sorted(learnt, key=learnt.__getitem__)]


def tiktoken_llama3(path: Path) -> TokenizerConfig:
    pytest.importorskip("tiktoken")
    lines = [f"{base64.b64encode(piece).decode()} {rank}\n" for rank, piece in enumerate(ranks())]
    (path / "tokenizer.model").write_text("".join(lines))
    return TokenizerConfig(type="tiktoken", model=str(path / "tokenizer.model"), tiktoken_special_ids=8)


def tiktoken_megatron(path: Path) -> TokenizerConfig:
    """Special ids before all others, sentinels behind."""
    pytest.importorskip("tiktoken")
    records = [{"rank": rank, "token_bytes": base64.b64encode(piece).decode()} for rank, piece in enumerate(ranks())]
    (path / "vocab.json").write_text(json.dumps(records))
    return TokenizerConfig(type="tiktoken", model=str(path / "vocab.json"), tiktoken_special_ids=9, extra_ids=2)


KINDS = [
    llama, t5, megatron, unigram_with_bytes, quickstart, gpt2, tok_json, uncased, cased, tiktoken_llama3,
    tiktoken_megatron,
]  # fmt: skip


def loaded(folder: Path, model_type: str, trusted: bool | None = None) -> Any:
    """The tokenizer of a folder; `trusted` = its own code may be run."""
    import transformers

    (folder / "config.json").write_text(json.dumps({"model_type": model_type}))
    return transformers.AutoTokenizer.from_pretrained(folder, trust_remote_code=trusted)


def texts(ours: Tokenizer) -> Iterator[str]:
    yield from ours.probes([*PROBES, *TEXTS, " ".join(TEXTS), TEXTS[0] * 20])


def assert_same(ours: Tokenizer, theirs: Any) -> None:
    """Ids and texts, with names of special tokens in them and as special tokens; special ids; vocabulary."""
    for text in texts(ours):
        ids = ours.encode(text)
        assert theirs(text, add_special_tokens=False, split_special_tokens=True)["input_ids"] == ids, text
        assert theirs.decode(ids) == ours.decode(ids), text
        marked = theirs(text, add_special_tokens=False, split_special_tokens=False)["input_ids"]
        assert marked == ours.encode_marked(text), text
    for role in ("bos", "eos", "pad", "unk", "cls", "sep", "mask"):
        assert getattr(theirs, f"{role}_token_id") == ours.id_for(role), role
    sentinels = [f"<extra_id_{i}>" for i in range(len(ours.sentinel_ids))]
    assert tuple(theirs.convert_tokens_to_ids(sentinels)) == ours.sentinel_ids
    assert max(theirs.get_vocab().values()) + 1 == ours.vocab_size


@pytest.mark.parametrize(
    ("kind", "model_type"), [*((kind, "llama") for kind in KINDS), (gpt2, "gpt2"), (gpt2, "qwen2"), (llama, "qwen2")]
)
def test_ids_of_transformers_are_ours(kind: Any, model_type: str, tmp_path: Path) -> None:
    """GPT-2, LLaMA and Qwen2: transformers has classes of their own for them, which are not asked."""
    (tmp_path / "out").mkdir()
    ours = build_tokenizer(kind(tmp_path))
    assert write_tokenizer(ours, tmp_path / "out", model_type=model_type, longest=64, names_are_text=True)
    for trusted in (None, True) if model_type == "qwen2" else (None,):  # None would ask at a terminal, if at all
        theirs = loaded(tmp_path / "out", model_type, trusted)
        assert_same(ours, theirs)
        for text in texts(ours):  # as AutoTokenizer gives them to whoever does not ask for anything
            assert theirs(text)["input_ids"] == ours.encode(text)


@pytest.mark.parametrize(("kind", "model_type"), [(cased, "bert"), (uncased, "megatron-bert"), (t5, "t5")])
def test_masked_models_read_the_names_of_special_tokens(kind: Any, model_type: str, tmp_path: Path) -> None:
    """[MASK] and <extra_id_0> in a prompt are the tokens; BERT's texts stand between [CLS] and [SEP]."""
    (tmp_path / "out").mkdir()
    ours = build_tokenizer(kind(tmp_path))
    masked = model_type != "t5"
    family = "bert" if masked else "t5"
    write_tokenizer(ours, tmp_path / "out", model_type=model_type, longest=64, names_are_text=False, family=family)
    theirs = loaded(tmp_path / "out", model_type)
    assert_same(ours, theirs)
    words = ours.encode("the world")
    if masked:
        assert theirs("the world[MASK]")["input_ids"] == [ours.cls_id, *words, ours.mask_id, ours.sep_id]
        assert theirs("the world", "the world")["input_ids"] == [ours.cls_id, *words, ours.sep_id, *words, ours.sep_id]
    else:
        assert theirs("the world<extra_id_9>")["input_ids"] == [*words, ours.sentinel_ids[9]]


def test_texts_of_plain_ids(tmp_path: Path) -> None:
    """A run whose texts are numbers has a tokenizer of numbers, which reads nothing else."""
    (tmp_path / "out").mkdir()
    ours = build_tokenizer(TokenizerConfig(type="null", vocab_size=50, extra_ids=3))
    write_tokenizer(ours, tmp_path / "out", model_type="gpt2", longest=64, names_are_text=True)
    theirs = loaded(tmp_path / "out", "gpt2")
    assert theirs(" 3  49\n0")["input_ids"] == ours.encode(" 3  49\n0") == [3, 49, 0]
    assert theirs.decode([3, 49, 0]) == "3 49 0"
    assert (len(theirs), theirs.eos_token_id) == (ours.vocab_size, ours.eod_id)
    assert tuple(theirs.convert_tokens_to_ids([f"<extra_id_{i}>" for i in range(3)])) == ours.sentinel_ids
    with pytest.raises(Exception, match="UNK"):
        theirs("a")


def test_what_would_mean_other_ids_is_not_written(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A model of whole words; transformers says that there is no tokenizer instead of making one up."""
    (tmp_path / "out").mkdir()
    file = pieces(tmp_path / "w.model", model_type="word", vocab_size=30)
    ours = build_tokenizer(TokenizerConfig(type="sentencepiece", model=file))
    assert not write_tokenizer(ours, tmp_path / "out", model_type="gpt2", longest=64, names_are_text=True)
    assert "the exported model has no tokenizer" in caplog.text and "words" in caplog.text
    with pytest.raises(ValueError, match="tokenizer"):
        loaded(tmp_path / "out", "gpt2")


def made_run(folder: Path, tokenizer: TokenizerConfig, *more: str) -> tuple[Path, Tokenizer]:
    """A run of one layer, never trained, and its tokenizer."""
    ours = build_tokenizer(tokenizer)
    words = [
        "model.num_layers=1", "model.hidden_size=8", "model.num_heads=2", "model.max_positions=16",
        "data.seq_length=16", f"model.vocab_size={ours.vocab_size}", f"tokenizer.type={tokenizer.type}",
        *(f"tokenizer.{name}={getattr(tokenizer, name)}" for name in ("model", "vocab", "merges")),
        *more,
    ]  # fmt: skip
    config = load_config(None, [word for word in words if not word.endswith("=None")]).config
    run = folder / "run"
    run.mkdir()
    (run / "config.yaml").write_text(dump_config(config))
    with Checkpoints(run / "checkpoints", CheckpointConfig()) as checkpoints:
        checkpoints.save(3, {"params": trained(config.model)}, {"step": 3, "tokenizer": dict(ours.identity)})
    return run, ours


@pytest.mark.parametrize("kind", [quickstart, gpt2, tok_json])
def test_an_exported_run(kind: Any, tmp_path: Path) -> None:
    """Through `megajax.convert export`, model and tokenizer together."""
    import transformers

    run, ours = made_run(tmp_path, kind(tmp_path))
    export_model(run, tmp_path / "out")
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    assert_same(ours, theirs)
    assert len(theirs) == transformers.AutoConfig.from_pretrained(tmp_path / "out").vocab_size
    assert theirs("hello")["input_ids"] == ours.encode("hello")


@pytest.mark.parametrize("kind", [quickstart, gpt2])
def test_roles_as_text_are_told(kind: Any, tmp_path: Path) -> None:
    """A run of instruction data without a chat template says how it wrote conversations."""
    run, ours = made_run(tmp_path, kind(tmp_path), "data.kind=instruction")
    export_model(run, tmp_path / "out")
    theirs = loaded(tmp_path / "out", "gpt2")
    messages = [
        {"role": "system", "content": "the world"}, {"role": "user", "content": "hello"},
        {"role": "assistant", "content": "The king"}, {"role": "user", "content": "and on?"},
    ]  # fmt: skip
    for said in (messages[:2], messages):
        there = theirs.apply_chat_template(said, add_generation_prompt=True)["input_ids"]
        assert there == Chat(ours).prompt(said)
