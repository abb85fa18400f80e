"""What the model reads: tokenizer, sources, splits and how documents are cut into samples."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, NonNegativeInt, PositiveInt

from megajax.config.base import component


def _one_or_many(value: Any) -> Any:
    return (value,) if isinstance(value, str) else value


def _null_is_a_name(value: Any) -> Any:
    return "null" if value is None else value


Paths = Annotated[tuple[str, ...], BeforeValidator(_one_or_many)]
"""One file name or a list of them, as written by the user: relative to the working directory."""
TokenizerType = Annotated[
    Literal["sentencepiece", "gpt2_bpe", "huggingface", "null"],
    BeforeValidator(_null_is_a_name),  # YAML reads an unquoted null as nothing
]


@component
class TokenizerConfig:
    """Which tokenizer turns text into ids, and from which files."""

    type: TokenizerType = "null"
    """sentencepiece (set model), gpt2_bpe (set vocab and merges), huggingface (set model), null (set vocab_size)."""
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

    path: Paths = ()
    """Token files: `prefix`, `[prefix, ...]` or `[weight, prefix, weight, prefix, ...]` (Megatron's --data-path)."""
    train_path: Paths = ()
    """The same, for training only (with valid_path and test_path, instead of path and split)."""
    valid_path: Paths = ()
    """The same, for validation only."""
    test_path: Paths = ()
    """The same, for the test set only."""
    text: Paths = ()
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
