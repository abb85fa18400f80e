"""What the model reads: tokenizer, sources, splits and how documents are cut into samples."""

from __future__ import annotations

from typing import Literal

from pydantic import NonNegativeInt, PositiveInt

from megajax.config.base import component


@component
class TokenizerConfig:
    """Which tokenizer turns text into ids, and from which files."""

    type: Literal["sentencepiece", "gpt2_bpe", "huggingface", "null"] = "null"
    """sentencepiece (model=*.model), gpt2_bpe (vocab=, merges=), huggingface (model=tokenizer.json), null (vocab_size=)."""
    model: str | None = None
    """SentencePiece .model or Hugging Face tokenizer.json file."""
    vocab: str | None = None
    """vocab.json of a GPT-2 BPE."""
    merges: str | None = None
    """merges.txt of a GPT-2 BPE."""
    vocab_size: PositiveInt | None = None
    """null: number of plain ids (the end-of-document id comes after them). sentencepiece: pieces to train."""


@component
class DataConfig:
    """Sources of training text and how samples are made of them."""

    path: tuple[str, ...] = ()
    """Token files: `[prefix]`, `[prefix, prefix, ...]` or `[weight, prefix, weight, prefix, ...]` (Megatron's --data-path)."""
    train_path: tuple[str, ...] = ()
    """The same, for training only (with valid_path and test_path, instead of path and split)."""
    valid_path: tuple[str, ...] = ()
    """The same, for validation only."""
    test_path: tuple[str, ...] = ()
    """The same, for the test set only."""
    text: tuple[str, ...] = ()
    """jsonl files to tokenize first, into OUTPUT_DIR/data; replaces path."""
    text_key: str = "text"
    """Key of the jsonl records that holds the document."""
    split: str = "969,30,1"
    """Relative sizes of the train, validation and test part of each source."""
    seq_length: PositiveInt = 1024
    """S, tokens per sample."""
    mask_eod_loss: bool = False
    """No loss where the input token is the end of a document."""
    reset_positions: bool = False
    """Positions restart at 0 after every end of document."""
    reset_attention: bool = False
    """A document does not attend to the ones before it in the same sample."""
    cache_dir: str | None = None
    """Where the sample order is cached; unset = beside each source."""
    prefetch: NonNegativeInt = 4
    """Batches read ahead; 0 = read in the training thread."""
