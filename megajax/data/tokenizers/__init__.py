"""Text to token ids and back.

Every tokenizer here turns text into exactly its tokens: no beginning or end of sequence is added (the pipeline appends
the end-of-document id), nothing is truncated or padded, and a literal "<|endoftext|>" in a document is ordinary text.
Ids that are added to a vocabulary come after it, in Megatron-LM's order, so that token files can be exchanged.
"""

from megajax.data.tokenizers.build import build_tokenizer, needs_training, train_tokenizer
from megajax.data.tokenizers.fast import FastTokenizer
from megajax.data.tokenizers.null import NullTokenizer
from megajax.data.tokenizers.pieces import SentencePieceTokenizer, train_sentencepiece
from megajax.data.tokenizers.tokenizer import Tokenizer

__all__ = [
    "FastTokenizer",
    "NullTokenizer",
    "SentencePieceTokenizer",
    "Tokenizer",
    "build_tokenizer",
    "needs_training",
    "train_sentencepiece",
    "train_tokenizer",
]
