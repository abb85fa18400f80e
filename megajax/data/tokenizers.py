"""Text to token ids and back.

Every tokenizer here turns text into exactly its tokens: no beginning or end of sequence is added (the pipeline appends
the end-of-document id), nothing is truncated or padded, and a literal "<|endoftext|>" in a document is ordinary text.
The end-of-document id is the end-of-sequence piece, as with Megatron-LM's GPTSentencePiece, Llama2 and HuggingFace
tokenizers; Megatron's SentencePieceTokenizer, which adds an <EOD> piece of its own, has no counterpart.
"""

from __future__ import annotations

import hashlib
import io
import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

import sentencepiece
import tokenizers

from megajax.config.base import ConfigError
from megajax.config.data import TokenizerConfig
from megajax.data.files import atomic_write

_GPT2_EOD = "<|endoftext|>"
_KNOWN_EODS = (_GPT2_EOD, "<|end_of_text|>", "</s>", "<eos>", "<|im_end|>")


class Tokenizer(Protocol):
    """What the rest of the system knows of a tokenizer."""

    vocab_size: int
    """Number of ids, before any padding of the vocabulary."""
    eod_id: int
    """End of document; also ends a generated text."""
    bos_id: int | None
    """Beginning of sequence, where the tokenizer has one."""
    pad_id: int | None
    """Padding, where the tokenizer has a piece for it."""
    unk_id: int | None
    """What text without a piece turns into; None where every text has pieces."""
    identity: dict[str, str | int]
    """Kind, size and hash of the contents: equal for two tokenizers that give the same ids."""

    def encode(self, text: str) -> list[int]:
        """Return the ids of a text."""
        ...

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of some ids."""
        ...


def build_tokenizer(config: TokenizerConfig) -> Tokenizer:
    """Load the tokenizer that a configuration names.

    Raises:
        ConfigError: a field is unset, or a file is missing or no tokenizer of that type.
    """
    match config.type:
        case "sentencepiece":
            return SentencePieceTokenizer(_required(config, "model"))
        case "gpt2_bpe":
            return gpt2_bpe(_required(config, "vocab"), _required(config, "merges"))
        case "huggingface":
            return huggingface(_required(config, "model"))
        case "null":
            if config.vocab_size is None:
                raise ConfigError("tokenizer.vocab_size is not set: tokenizer.type null needs the number of its ids")
            return NullTokenizer(config.vocab_size)


def _required(config: TokenizerConfig, field: str) -> Path:
    value = getattr(config, field)
    if value is None:
        raise ConfigError(f"tokenizer.{field} is not set: tokenizer.type {config.type} reads a file from there")
    if not Path(value).is_file():
        raise ConfigError(f"{value}: no such file (tokenizer.{field})")
    return Path(value)


def _identity(kind: str, vocab_size: int, *files: Path) -> dict[str, str | int]:
    digest = hashlib.sha256(b"".join(hashlib.sha256(path.read_bytes()).digest() for path in files))
    return {"type": kind, "vocab_size": vocab_size, "sha256": digest.hexdigest()}


class SentencePieceTokenizer:
    """A SentencePiece model; `</s>` ends a document."""

    def __init__(self, path: Path):
        try:
            self._model = sentencepiece.SentencePieceProcessor(model_proto=path.read_bytes())
        except RuntimeError as error:
            raise ConfigError(f"{path}: not a SentencePiece model ({error})") from None
        if self._model.eos_id() < 0:
            raise ConfigError(f"{path}: has no end-of-sentence piece to end documents with")
        self.vocab_size, self.eod_id = self._model.vocab_size(), self._model.eos_id()
        self.bos_id, self.pad_id = _present(self._model.bos_id()), _present(self._model.pad_id())
        self.unk_id = _present(self._model.unk_id())
        self.identity = _identity("sentencepiece", self.vocab_size, path)

    def encode(self, text: str) -> list[int]:
        """Return the ids of a text."""
        return self._model.encode(text)

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of some ids; control pieces have none."""
        return self._model.decode([int(i) for i in ids])


def _present(piece: int) -> int | None:
    return piece if piece >= 0 else None


class FastTokenizer:
    """A tokenizer of the `tokenizers` library: GPT-2 byte-level BPE or any Hugging Face tokenizer.json."""

    def __init__(self, tokenizer: tokenizers.Tokenizer, special: dict[str, str], kind: str, *files: Path):
        # what a tokenizer.json asks for at inference would cut and pad documents
        tokenizer.no_truncation()
        tokenizer.no_padding()
        tokenizer.encode_special_tokens = True
        self._tokenizer = tokenizer
        ids: dict[str, Any] = {role: tokenizer.token_to_id(token) for role, token in special.items()}
        self.eod_id = ids["eos"]
        self.bos_id, self.pad_id, self.unk_id = ids.get("bos"), ids.get("pad"), ids.get("unk")
        # a vocabulary may have gaps
        self.vocab_size = max(tokenizer.get_vocab().values()) + 1
        self.identity = _identity(kind, self.vocab_size, *files)

    def encode(self, text: str) -> list[int]:
        """Return the ids of a text."""
        return self._tokenizer.encode(text, add_special_tokens=False).ids

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of some ids, special tokens by their name."""
        return self._tokenizer.decode([int(i) for i in ids], skip_special_tokens=False)


def gpt2_bpe(vocab: Path, merges: Path) -> FastTokenizer:
    """Load the byte-level BPE of GPT-2 from vocab.json and merges.txt; `<|endoftext|>` ends a document."""
    try:
        model = tokenizers.models.BPE.from_file(str(vocab), str(merges))
    except Exception as error:  # the library raises nothing narrower
        raise ConfigError(f"{vocab}, {merges}: not a GPT-2 vocabulary and merges ({error})") from None
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    if tokenizer.token_to_id(_GPT2_EOD) is None:
        raise ConfigError(f"{vocab}: has no {_GPT2_EOD} to end documents with")
    return FastTokenizer(tokenizer, {"eos": _GPT2_EOD}, "gpt2_bpe", vocab, merges)


def huggingface(path: Path) -> FastTokenizer:
    """Load a tokenizer.json.

    That file does not say which token ends a text: it is the eos_token of a tokenizer_config.json beside it, else the
    first of the usual names that the vocabulary has.
    """
    try:
        tokenizer = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises nothing narrower
        raise ConfigError(f"{path}: not a tokenizer.json ({error})") from None
    special = _special_tokens(path.with_name("tokenizer_config.json"))
    candidates = (special["eos"],) if "eos" in special else _KNOWN_EODS
    known = [name for name in candidates if tokenizer.token_to_id(name) is not None]
    if not known:
        raise ConfigError(
            f"{path}: has no {' or '.join(candidates)}; set eos_token in a tokenizer_config.json beside it"
        )
    special["eos"] = known[0]
    return FastTokenizer(tokenizer, special, "huggingface", path)


def _special_tokens(path: Path) -> dict[str, str]:
    """Read the names of the eos, bos, pad and unk token from a tokenizer_config.json, where there is one."""
    if not path.is_file():
        return {}
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigError(f"{path}: not JSON ({error})") from None
    tokens = {role: config.get(f"{role}_token") for role in ("eos", "bos", "pad", "unk")}
    names = {role: token["content"] if isinstance(token, dict) else token for role, token in tokens.items()}
    return {role: name for role, name in names.items() if name is not None}


class NullTokenizer:
    """Text that is token ids already, as integers between spaces; id `ids` comes after them and ends a document."""

    def __init__(self, ids: int):
        self.eod_id, self.vocab_size = ids, ids + 1
        self.bos_id: int | None = None
        self.pad_id: int | None = None
        self.unk_id: int | None = None
        self.identity: dict[str, str | int] = {"type": "null", "vocab_size": self.vocab_size}

    def encode(self, text: str) -> list[int]:
        """Return the ids written in a text."""
        try:
            ids = [int(word) for word in text.split()]
        except ValueError as error:
            raise ConfigError(f"tokenizer.type null reads integers between spaces: {error}") from None
        for i in ids:
            if not 0 <= i < self.eod_id:
                raise ConfigError(f"token id {i} is not below tokenizer.vocab_size {self.eod_id}")
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        """Write ids as text."""
        return " ".join(str(i) for i in ids)


def train_sentencepiece(texts: Iterable[str], out_path: str | Path, vocab_size: int) -> None:
    """Train a lossless BPE with byte fallback on some texts and write it as a SentencePiece .model.

    Nothing is normalised and bytes stand in for what has no piece, line ends included: `decode(encode(text)) == text`
    for every text without U+2581, SentencePiece's own sign for a space. The same texts give the same file. All of them
    are held in memory: train on a part of a large corpus.

    Raises:
        ConfigError: there is no text, or too little or too much of it for that many pieces.
    """
    model = io.BytesIO()
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=_lines(texts),
            model_writer=model,
            model_type="bpe",
            vocab_size=vocab_size,
            byte_fallback=True,
            character_coverage=1.0,
            normalization_rule_name="identity",
            remove_extra_whitespaces=False,
            add_dummy_prefix=False,
            num_threads=1,
            minloglevel=2,
        )
    except RuntimeError as error:
        reason = str(error).rpartition("] ")[2] or "there is none"
        raise ConfigError(f"tokenizer.vocab_size {vocab_size}: not that many pieces in this text: {reason}") from None
    out_path = Path(out_path)
    out_path.parent.mkdir(parents=True, exist_ok=True)
    with atomic_write(out_path) as file:
        file.write(model.getvalue())


def _lines(texts: Iterable[str]) -> Iterator[str]:
    """Cut texts at line ends, and lines at SentencePiece's limit of 4,192 bytes, beyond which it would drop them."""
    for text in texts:
        for line in text.split("\n"):
            for start in range(0, len(line), 1000):
                yield line[start : start + 1000]
