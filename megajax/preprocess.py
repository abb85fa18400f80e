r"""`python -m megajax.preprocess`: text to token files, or text to a tokenizer.

    python -m megajax.preprocess --input corpus.jsonl --output-prefix data/corpus --train-tokenizer --vocab-size 8192
    python -m megajax.preprocess --input corpus.jsonl --output-prefix data/corpus \
        --tokenizer-type sentencepiece --tokenizer-model data/corpus.model

Flags are Megatron-LM's where it has them. The second command writes `data/corpus_text_document.bin` and `.idx`, which
Megatron reads too.
"""

from __future__ import annotations

import argparse
import logging
import sys
from typing import get_args, get_type_hints

from megajax.config.base import ConfigError
from megajax.config.cli import OneLineParser, entry_point
from megajax.config.data import TokenizerConfig
from megajax.data.corpus import preprocess
from megajax.data.jsonl import read_documents
from megajax.data.tokenizers import train_sentencepiece

_TOKENIZER_TYPES = get_args(get_type_hints(TokenizerConfig)["type"])
_MEGATRON_TYPES = {
    "GPTSentencePieceTokenizer": "sentencepiece",
    "GPT2BPETokenizer": "gpt2_bpe",
    "HuggingFaceTokenizer": "huggingface",
    "NullTokenizer": "null",
}


@entry_point
def main(argv: list[str]) -> None:
    """Run the command line and say on stdout what was written."""
    logging.basicConfig(format="%(levelname)s: %(message)s")
    args = _parser().parse_args(argv)
    if args.train_tokenizer:
        _train_tokenizer(args)
    else:
        _preprocess(args)


def _train_tokenizer(args: argparse.Namespace) -> None:
    if args.vocab_size is None:
        raise ConfigError("--train-tokenizer needs --vocab-size, the number of pieces")
    path = f"{args.output_prefix}.model"
    texts = (text for key in args.json_keys for text in read_documents(args.input, key))
    train_sentencepiece(texts, path, args.vocab_size)
    print(f"{path}: a SentencePiece tokenizer of {args.vocab_size:,} pieces")


def _preprocess(args: argparse.Namespace) -> None:
    if args.tokenizer_type is None:
        raise ConfigError(f"--tokenizer-type is not set; choose one of {', '.join(_TOKENIZER_TYPES)}")
    tokenizer = TokenizerConfig(
        type=_MEGATRON_TYPES.get(args.tokenizer_type, args.tokenizer_type),
        model=args.tokenizer_model,
        vocab=args.vocab_file,
        merges=args.merge_file,
        vocab_size=args.vocab_size,
    )
    for key in args.json_keys:
        report = preprocess(
            args.input,
            args.output_prefix,
            tokenizer,
            key,
            append_eod=args.append_eod,
            on_bad_line=args.on_bad_line,
            workers=args.workers,
        )
        print(report)


def _parser() -> argparse.ArgumentParser:
    parser = OneLineParser(
        prog="python -m megajax.preprocess",
        description="Turn text into token files, or into a tokenizer.",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--input", nargs="+", required=True, metavar="FILE", help="JSON Lines files, .gz or not")
    add("--output-prefix", required=True, metavar="P", help="writes P_KEY_document.bin and .idx, or P.model")
    add("--json-keys", nargs="+", default=["text"], metavar="KEY", help="keys that hold text (default: text)")
    add("--tokenizer-type", choices=[*_TOKENIZER_TYPES, *_MEGATRON_TYPES], help="what turns text into ids")
    add("--tokenizer-model", metavar="FILE", help="SentencePiece .model or Hugging Face tokenizer.json")
    add("--vocab-file", metavar="FILE", help="vocab.json of a GPT-2 BPE")
    add("--merge-file", metavar="FILE", help="merges.txt of a GPT-2 BPE")
    add("--vocab-size", type=_positive, metavar="N", help="ids of the null tokenizer, or pieces to train")
    add(
        "--append-eod",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="end documents with the end-of-document id (default: yes; Megatron's tool: no)",
    )
    add("--on-bad-line", choices=["error", "skip"], default="error", help="what to do about a line without a document")
    add("--workers", type=_positive, default=1, metavar="N", help="processes (default: 1)")
    add("--train-tokenizer", action="store_true", help="only train a SentencePiece tokenizer on the input")
    return parser


def _positive(word: str) -> int:
    number = int(word)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{word} is not positive")
    return number


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
