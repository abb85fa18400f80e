"""Construction of the tokenizer that a configuration names."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from typing import Any

from megajax.config.base import InputError
from megajax.config.data import TokenizerConfig
from megajax.config.run_files import TOKENIZER_FILES, TRAINED_TOKENIZER
from megajax.data.tokenizers.beside import BESIDE, read_beside, read_text
from megajax.data.tokenizers.fast import bert_wordpiece, gpt2_bpe, huggingface, train_wordpiece
from megajax.data.tokenizers.pieces import SentencePieceTokenizer, train_sentencepiece
from megajax.data.tokenizers.ranks import RankTokenizer
from megajax.data.tokenizers.tokenizer import NullTokenizer, Tokenizer


def build_tokenizer(config: TokenizerConfig) -> Tokenizer:
    """Load the tokenizer that a configuration names, with its prefix of texts and its chat template.

    Raises:
        InputError: a field is unset, or a file is missing or does not hold a tokenizer of that type.
    """
    tokenizer = _load(config)
    if config.bos and tokenizer.bos_id is None:
        raise InputError(
            f"tokenizer.bos is true, but this {config.type} tokenizer has no beginning of sequence: unset it"
        )
    if config.bos is not None:
        tokenizer.prefix = (tokenizer.bos_id,) if config.bos and tokenizer.bos_id is not None else ()
    file = config.model or config.vocab
    if config.chat_template is not None:
        tokenizer.chat_template = read_text(_required(config, "chat_template"))
    elif file is not None:
        tokenizer.chat_template = read_beside(Path(file)).chat_template
    return tokenizer


def _load(config: TokenizerConfig) -> Tokenizer:
    extra = config.extra_ids
    match config.type:
        case "sentencepiece":
            return SentencePieceTokenizer(
                _required(config, "model"), config.special_ids, extra, config.extra_ids_descend
            )
        case "gpt2_bpe":
            return gpt2_bpe(_required(config, "vocab"), _required(config, "merges"), extra)
        case "huggingface":
            return huggingface(_required(config, "model"), extra)
        case "bert_wordpiece":
            return bert_wordpiece(_required(config, "vocab"), config.lower_case, extra, config.append_ends)
        case "tiktoken":
            return RankTokenizer(_required(config, "model"), config)
        case "null":
            if config.vocab_size is None:
                raise InputError("tokenizer.vocab_size is not set: tokenizer.type null needs the number of its ids")
            return NullTokenizer(config.vocab_size, extra)


def needs_training(config: TokenizerConfig) -> bool:
    """Tell whether a configuration gives the size of a tokenizer instead of its file."""
    file = {"sentencepiece": config.model, "bert_wordpiece": config.vocab}.get(config.type, "none is trained")
    return file is None and config.vocab_size is not None


def train_tokenizer(config: TokenizerConfig, texts: Iterable[str], directory: Path) -> None:
    """Train a tokenizer that `needs_training`, into the file that `in_directory` names.

    Raises:
        InputError: the texts do not have that many pieces.
    """
    assert config.vocab_size is not None
    _, name = TRAINED_TOKENIZER[config.type]
    if config.type == "bert_wordpiece":
        train_wordpiece(texts, directory / name, config.vocab_size, config.lower_case)
    else:
        train_sentencepiece(texts, directory / name, config.vocab_size)


def tokenizer_files(config: TokenizerConfig) -> list[Path]:
    """List the files from which a tokenizer is read: those that it names, and those that may lie beside the first of
    them.

    No two have the same name, so that they can be copied into one folder.

    Raises:
        InputError: two named files have the same name.
    """
    named = [Path(name) for key in TOKENIZER_FILES if (name := getattr(config, key)) is not None]
    for one, other in combinations(named, 2):
        if one.name == other.name:
            raise InputError(f"{one} and {other} are files of one tokenizer, and have the same name: rename one")
    file = config.model or config.vocab
    beside = set(BESIDE) - {path.name for path in named}  # a named template replaces the one beside
    return [*named, *(Path(file).with_name(name) for name in BESIDE if file and name in beside)]


def in_directory(config: TokenizerConfig, directory: Path) -> TokenizerConfig:
    """Return the same tokenizer with its files in a directory: copies of them, or the file trained there."""
    names: dict[str, Any] = {key: getattr(config, key) for key in TOKENIZER_FILES}
    if needs_training(config):
        key, names[key] = TRAINED_TOKENIZER[config.type]
    names = {key: name and str(directory / Path(name).name) for key, name in names.items()}
    return replace(config, **names)


def _required(config: TokenizerConfig, field: str) -> Path:
    value = getattr(config, field)
    if value is None:
        raise InputError(f"tokenizer.{field} is not set: tokenizer.type {config.type} reads a file from there")
    if not Path(value).is_file():
        raise InputError(f"{value}: no such file (tokenizer.{field})")
    return Path(value)
