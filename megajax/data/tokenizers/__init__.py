"""Tokenizers: text to token ids and back.

Every tokenizer here turns text into exactly its tokens: no beginning or end of sequence is added, nothing is truncated
or padded, and a literal "<|endoftext|>" in a document is ordinary text. The tokens around a document or prompt
(`prefix`, `suffix`, `eod_id`) are added by the code that makes one. `encode_marked` reads names of special tokens as
these tokens, for chats and marked prompts; `interop.hf.tokenizers` writes any tokenizer as transformers reads it.
Ids that are added to a vocabulary come after it, in Megatron-LM's order, so that token files can be exchanged.
"""

from megajax.data.tokenizers.build import (
    build_tokenizer,
    in_directory,
    needs_training,
    tokenizer_files,
    train_tokenizer,
)
from megajax.data.tokenizers.fast import FastTokenizer
from megajax.data.tokenizers.pieces import SentencePieceTokenizer, train_sentencepiece
from megajax.data.tokenizers.tokenizer import NullTokenizer, Tokenizer

__all__ = [
    "FastTokenizer",
    "NullTokenizer",
    "SentencePieceTokenizer",
    "Tokenizer",
    "build_tokenizer",
    "in_directory",
    "needs_training",
    "tokenizer_files",
    "train_sentencepiece",
    "train_tokenizer",
]
