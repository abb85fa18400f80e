r"""`python -m megajax.preprocess`: turn text into token files, or into a tokenizer.

    python -m megajax.preprocess --input corpus.jsonl --output-prefix data/corpus --train-tokenizer --vocab-size 8192
    python -m megajax.preprocess --input corpus.jsonl --output-prefix data/corpus \
        --tokenizer-type sentencepiece --tokenizer-model data/corpus.model --workers 8
    python -m megajax.preprocess --inspect data/corpus_text_document
    python -m megajax.preprocess --merge data/corpus_text_document data/more_text_document --output-prefix data/all

Flags are Megatron-LM's where it has them. The second command writes `data/corpus_text_document.bin` and `.idx`, which
Megatron reads too; when it was cut short, the same command continues it. Input may be JSON Lines (.jsonl), plain text
(.txt) or Parquet, and the first two packed (.gz, .zst, .bz2, .xz); 'corpus/*.jsonl' stands for all files that match. A
packed or Parquet file is read by one worker: give many.
"""

from __future__ import annotations

import argparse
import logging
import re
import sys
from pathlib import Path
from typing import get_args, get_type_hints

from megajax.config.base import InputError
from megajax.config.cli import OneLineParser, entry_point
from megajax.config.data import TokenizerConfig
from megajax.config.keys import MEGATRON_TOKENIZERS
from megajax.corpus.corpus import preprocess_keys
from megajax.corpus.readers import input_files, read_documents
from megajax.corpus.shards import Options
from megajax.corpus.token_files import describe_token_files, merge_token_files, prefixes_in
from megajax.data.tokenizers import build_tokenizer, train_sentencepiece

_TOKENIZER_TYPES = get_args(get_type_hints(TokenizerConfig)["type"])
_FLAGS = {
    "tokenizer.type": "--tokenizer-type",
    "tokenizer.model": "--tokenizer-model",
    "tokenizer.vocab": "--vocab-file",
    "tokenizer.merges": "--merge-file",
    "tokenizer.vocab_size": "--vocab-size",
    "tokenizer.extra_ids": "--vocab-extra-ids",
    "tokenizer.tiktoken_pattern": "--tiktoken-pattern",
    "tokenizer.tiktoken_special_ids": "--tiktoken-num-special-tokens",
    "tokenizer.bos": "--append-bos",
}
"""Keys of the configuration, of which refusals speak -> the flags that set them here."""


@entry_point
def main(argv: list[str]) -> None:
    """Run the command line and say on stdout what was written."""
    logging.basicConfig(format="%(levelname)s: %(message)s")
    logging.getLogger("megajax").setLevel(logging.INFO)
    try:
        _run(_parser().parse_args(argv))
    except InputError as error:
        flags = _FLAGS | {"tokenizer.special_ids": "--tokenizer-type SentencePieceTokenizer"}
        key = r"(?<![\w/.-])tokenizer\.\w+\b(?!:)"  # in a path, or before a colon, it is the name of a file
        raise type(error)(re.sub(key, lambda found: flags.get(found[0], found[0]), str(error))) from error


def _run(args: argparse.Namespace) -> None:
    if args.inspect is not None:
        print(describe_token_files(args.inspect, build_tokenizer(_tokenizer(args)) if args.tokenizer_type else None))
        return
    if args.output_prefix is None:
        raise InputError("--output-prefix is not set: where is the output to go?")
    if args.merge is not None:
        prefixes = [prefix for source in args.merge for prefix in prefixes_in(source)]
        if Path(args.output_prefix).resolve() in [Path(prefix).resolve() for prefix in prefixes]:
            raise InputError(f"{args.output_prefix} is among the files to be merged: choose another --output-prefix")
        merge_token_files(prefixes, args.output_prefix)
        print(f"{args.output_prefix}: {len(prefixes)} pairs of token files in one")
        return
    if args.input is None:
        raise InputError("--input is not set: which files hold the text?")
    args.input = input_files(args.input)
    if args.train_tokenizer:
        _train_tokenizer(args)
    else:
        _preprocess(args)


def _train_tokenizer(args: argparse.Namespace) -> None:
    if args.vocab_size is None:
        raise InputError("--train-tokenizer needs --vocab-size, the number of pieces")
    path = f"{args.output_prefix}.model"
    texts = (text for key in args.json_keys for text in read_documents(args.input, key))
    train_sentencepiece(texts, path, args.vocab_size)
    print(f"{path}: a SentencePiece tokenizer of {args.vocab_size:,} pieces")


def _preprocess(args: argparse.Namespace) -> None:
    options = Options(
        keys=tuple(dict.fromkeys(args.json_keys)),
        append_eod=not args.split_sentences if args.append_eod is None else args.append_eod,
        split_sentences=args.split_sentences,
        text_documents=args.text_documents,
        on_bad_line=args.on_bad_line,
    )
    for report in preprocess_keys(args.input, args.output_prefix, _tokenizer(args), options, args.workers):
        print(report)


def _tokenizer(args: argparse.Namespace) -> TokenizerConfig:
    if args.tokenizer_type is None:
        raise InputError(f"--tokenizer-type is not set; choose one of {', '.join(_TOKENIZER_TYPES)}")
    given = {key.partition(".")[2]: getattr(args, flag[2:].replace("-", "_")) for key, flag in _FLAGS.items()}
    values = {key: value for key, value in given.items() if value is not None}
    kind = MEGATRON_TOKENIZERS.get(args.tokenizer_type, {"type": args.tokenizer_type})
    return TokenizerConfig(**kind | values | {"type": kind["type"]})


def _parser() -> argparse.ArgumentParser:
    parser = OneLineParser(
        prog="python -m megajax.preprocess",
        description="Turn text into token files, or into a tokenizer; merge token files, or show what is in them.",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add(
        "--input",
        nargs="+",
        metavar="FILE",
        help="files to read: .jsonl or .txt (also with .gz, .zst, .bz2, .xz), .parquet, or patterns in quotes",
    )
    add("--output-prefix", metavar="P", help="beginning of output names: P_KEY_document.bin and .idx, or P.model")
    add("--json-keys", nargs="+", default=["text"], metavar="KEY", help="keys that hold text (default: text)")
    add(
        "--text-documents",
        choices=["file", "line"],
        default="file",
        help="part of a .txt file that is a document (default: the file)",
    )
    add(
        "--split-sentences",
        action="store_true",
        help="make a sequence of each sentence, for BERT, in P_KEY_sentence.bin and .idx",
    )
    add(
        "--append-eod",
        action=argparse.BooleanOptionalAction,
        help="end documents with the end-of-document id (default: yes, but not split ones; Megatron's tool: no)",
    )
    add(
        "--append-bos",
        action=argparse.BooleanOptionalAction,
        help="begin documents with the beginning-of-sequence id (default: if the tokenizer puts it before texts)",
    )
    add(
        "--on-bad-line",
        choices=["error", "skip"],
        default="error",
        help="treatment of a line without a document (default: error)",
    )
    add("--workers", type=_positive, default=1, metavar="N", help="number of worker processes (default: 1)")
    add("--train-tokenizer", action="store_true", help="only train a SentencePiece tokenizer on the input")
    add("--merge", nargs="+", metavar="PREFIX", help="write the documents of these token files (or folders) as P")
    add("--inspect", metavar="PREFIX", help="only show what is in these token files, decoded with a tokenizer")
    _add_tokenizer(parser)
    return parser


def _add_tokenizer(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "--tokenizer-type",
        choices=[*_TOKENIZER_TYPES, *MEGATRON_TOKENIZERS],
        help="type of the tokenizer, which turns text into ids",
    )
    add(
        "--tokenizer-model",
        metavar="FILE",
        help="file of the tokenizer: SentencePiece .model, Hugging Face tokenizer.json, or tiktoken file",
    )
    add(
        "--vocab-file",
        metavar="FILE",
        help="file of the vocabulary: vocab.json of a GPT-2 BPE, vocab.txt of a BERT WordPiece",
    )
    add("--merge-file", metavar="FILE", help="file of the merges: merges.txt of a GPT-2 BPE")
    add("--vocab-size", type=_positive, metavar="N", help="number of ids of the null tokenizer, or of pieces to train")
    add("--vocab-extra-ids", type=_positive, default=0, metavar="N", help="number of T5 sentinels to add (default: 0)")
    add("--tiktoken-pattern", choices=["v1", "v2", "llama3"], help="pattern by which a text is cut before merging")
    add(
        "--tiktoken-num-special-tokens",
        type=_positive,
        metavar="N",
        help="number of special ids of a tiktoken vocabulary",
    )


def _positive(word: str) -> int:
    number = int(word)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{word} is not positive")
    return number


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
