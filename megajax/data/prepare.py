"""From text to what training reads, once: tokenizer and token files are made in the run's directory and reused."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path

from megajax.config.data import DataConfig, TokenizerConfig
from megajax.data.corpus import preprocess
from megajax.data.jsonl import read_documents
from megajax.data.tokenizers import train_sentencepiece

log = logging.getLogger(__name__)


def prepare_text(data: DataConfig, tokenizer: TokenizerConfig, directory: Path) -> tuple[DataConfig, TokenizerConfig]:
    """Replace `data.text` by token files and an unset SentencePiece model by one trained on that text.

    Args:
        data: sources; returned as they are when they name no text.
        tokenizer: what turns the text into ids.
        directory: of the run.

    Raises:
        ConfigError: a text file cannot be used.
    """
    if not data.text:
        return data, tokenizer
    if tokenizer.type == "sentencepiece" and tokenizer.model is None:
        model = directory / "tokenizer.model"
        if not model.exists():
            assert tokenizer.vocab_size is not None
            log.info("training a SentencePiece tokenizer of %d pieces: %s", tokenizer.vocab_size, model)
            train_sentencepiece(read_documents(data.text, data.text_key), model, tokenizer.vocab_size)
        tokenizer = replace(tokenizer, model=str(model))
    prefixes = []
    for number, text in enumerate(data.text):
        name = Path(text).name.removesuffix(".gz").removesuffix(".jsonl")
        prefix = directory / "data" / f"{number}-{name}"  # the number tells files of the same name apart
        made = f"{prefix}_{data.text_key}_document"
        if not Path(f"{made}.idx").exists():
            prefix.parent.mkdir(parents=True, exist_ok=True)
            log.info("%s", preprocess([text], prefix, tokenizer, data.text_key))
        prefixes.append(made)
    return replace(data, text=(), path=tuple(prefixes)), tokenizer
