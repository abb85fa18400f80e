"""From text to what training reads, once: tokenizer and token files are made in the run's directory and reused."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path

from megajax.config.data import DataConfig, TokenizerConfig
from megajax.config.presets import find_bundled
from megajax.data.conversations import read_conversations, write_conversations
from megajax.data.corpus import preprocess
from megajax.data.readers import bare_name, input_files, read_documents
from megajax.data.tokenizers import build_tokenizer, needs_training, train_tokenizer

log = logging.getLogger(__name__)


def prepare_text(
    data: DataConfig, tokenizer: TokenizerConfig, directory: Path, kind: str = "gpt"
) -> tuple[DataConfig, TokenizerConfig]:
    """Replace `data.text` by token files and a tokenizer that has no file yet by one trained on that text.

    Args:
        data: sources; returned as they are when they name no text.
        tokenizer: what turns the text into ids.
        directory: of the run.
        kind: of the samples; for bert and t5 sequences are sentences, without ends of documents, for instruction the
            turns of conversations.

    Raises:
        ConfigError: a text file cannot be used.
    """
    if not data.text:
        return data, tokenizer
    data = replace(data, text=tuple(input_files(map(find_bundled, data.text))))
    if needs_training(tokenizer):
        log.info("a tokenizer of %d pieces, trained on this text: %s", tokenizer.vocab_size, directory)
        chats = kind == "instruction"
        texts = map("".join, read_conversations(data.text)) if chats else read_documents(data.text, data.text_key)
        tokenizer = train_tokenizer(tokenizer, texts, directory)
    prefixes = []
    for number, text in enumerate(data.text):
        prefix = directory / "data" / f"{number}-{bare_name(text)}"  # the number tells files of the same name apart
        prefixes.append(_tokenize(text, prefix, data.text_key, tokenizer, kind))
    return replace(data, text=(), path=tuple(prefixes)), tokenizer


def _tokenize(text: str, prefix: Path, key: str, tokenizer: TokenizerConfig, kind: str) -> str:
    """Make the token files of a text file, unless they are there; return their prefix."""
    if kind == "instruction":
        made = f"{prefix}_conversation"
        if not Path(f"{made}.idx").exists():
            count = write_conversations([text], made, build_tokenizer(tokenizer))
            log.info("%s: %d conversations", made, count)
        return made
    split_sentences = kind != "gpt"
    made = f"{prefix}_{key}_{'sentence' if split_sentences else 'document'}"
    if not Path(f"{made}.idx").exists():
        report = preprocess(
            [text], prefix, tokenizer, key, append_eod=not split_sentences, split_sentences=split_sentences
        )
        log.info("%s", report)
    return made
