"""Tokenizers that the `tokenizers` library runs: GPT-2's byte-level BPE, BERT's WordPiece, any tokenizer.json."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers

from megajax.config.base import InputError
from megajax.data.tokenizers.beside import read_beside
from megajax.data.tokenizers.tokenizer import ROLES, Tokenizer, file_identity, sentinel_names
from megajax.files import write_text

_GPT2_EOD = "<|endoftext|>"
_KNOWN_EODS = (_GPT2_EOD, "<|end_of_text|>", "</s>", "<eos>", "<|im_end|>", "[SEP]")
_BERT_NAMES = {role: f"[{role.upper()}]" for role in ROLES}
_BERT_PIECES = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
"""Tokens that every BERT vocabulary holds."""


class FastTokenizer(Tokenizer):
    """Tokenize with the `tokenizers` library.

    Args:
        tokenizer: tokenizer object of the library.
        names: names of its special tokens, by role; "eos" ends documents.
        kind: value of `tokenizer.type`.
        files: files that describe the tokenizer.
        extra_ids: number of T5 sentinels that it should have.
    """

    def __init__(self, tokenizer: tokenizers.Tokenizer, names: dict[str, str], kind: str, *files: Path, extra_ids: int):
        # settings of a tokenizer.json for inference would cut and pad documents
        tokenizer.no_truncation()
        tokenizer.no_padding()
        tokenizer.add_special_tokens(sentinel_names(extra_ids))
        tokenizer.encode_special_tokens = True
        self._tokenizer = tokenizer
        self._names = [name for name in names.values() if tokenizer.token_to_id(name) is not None]
        ids: dict[str, Any] = {role: tokenizer.token_to_id(name) for role, name in names.items()}
        self.eod_id = ids["eos"]
        self.bos_id, self.pad_id, self.unk_id = ids.get("bos"), ids.get("pad"), ids.get("unk")
        self.cls_id, self.sep_id, self.mask_id = ids.get("cls"), ids.get("sep"), ids.get("mask")
        vocabulary = tokenizer.get_vocab()
        self.sentinel_ids = tuple(vocabulary[name] for name in sentinel_names(extra_ids))
        # a vocabulary may have gaps
        self.vocab_size = max(vocabulary.values()) + 1
        self.identity = file_identity(kind, self.vocab_size, *files)

    def encode(self, text: str) -> list[int]:
        """Return the ids of a text.

        Raises:
            InputError: the vocabulary lacks a word of the text, and a token for unknown words.
        """
        with _reading():
            return self._tokenizer.encode(text, add_special_tokens=False).ids

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the ids of some texts; errors are those of `encode`."""
        with _reading():
            return [encoded.ids for encoded in self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)]

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of some ids, with special tokens as their names."""
        return self._tokenizer.decode([int(i) for i in ids], skip_special_tokens=False)

    def id_of(self, name: str) -> int | None:
        """Return the id of a token, or None if there is no such token."""
        return self._tokenizer.token_to_id(name)

    def as_fast(self) -> tokenizers.Tokenizer:
        """Return a copy of the library's object that puts nothing around a text."""
        made = tokenizers.Tokenizer.from_str(self._tokenizer.to_str())
        made.post_processor = processors.TemplateProcessing("$A", "$A $B:1", [])
        made.add_special_tokens(self._names)
        return made

    def encode_marked(self, text: str) -> list[int]:
        """Return the ids of a text in which the names of special tokens stand for these tokens, as in a chat prompt."""
        with _reading():
            return self._marked.encode(text, add_special_tokens=False).ids

    @cached_property
    def _marked(self) -> tokenizers.Tokenizer:
        return self.as_fast()

    @cached_property
    def continuations(self) -> np.ndarray:
        """Return whether each piece continues the word before it (WordPiece's ##), bool [vocab_size]."""
        found = np.zeros(self.vocab_size, bool)
        found[[i for piece, i in self._tokenizer.get_vocab().items() if piece.startswith("##")]] = True
        return found


@contextmanager
def _reading() -> Iterator[None]:
    try:
        yield
    except Exception as error:  # the library raises nothing narrower
        raise InputError(f"the tokenizer cannot read a text ({error})") from None


def gpt2_bpe(vocab: Path, merges: Path, extra_ids: int = 0) -> FastTokenizer:
    """Load the byte-level BPE of GPT-2 from vocab.json and merges.txt; `<|endoftext|>` ends a document."""
    try:
        model = models.BPE.from_file(str(vocab), str(merges))
    except Exception as error:  # the library raises nothing narrower
        raise InputError(f"{vocab}, {merges}: not a GPT-2 vocabulary and merges ({error})") from None
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    if tokenizer.token_to_id(_GPT2_EOD) is None:
        raise InputError(f"{vocab}: has no {_GPT2_EOD} to end documents with")
    return FastTokenizer(tokenizer, {"eos": _GPT2_EOD}, "gpt2_bpe", vocab, merges, extra_ids=extra_ids)


def huggingface(path: Path, extra_ids: int = 0) -> FastTokenizer:
    """Load a tokenizer.json.

    The file does not tell which token ends a text: it is the eos_token of a tokenizer_config.json beside it, else the
    first of the usual names that the vocabulary has. The tokens that the file puts before texts also precede documents
    and prompts, except for [CLS], which masked samples receive when they are cut. If the two files differ,
    tokenizer.json counts.
    """
    try:
        tokenizer = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises nothing narrower
        raise InputError(f"{path}: not a tokenizer.json ({error})") from None
    beside = read_beside(path)
    lacking = [
        name for name in sorted(beside.added, key=beside.added.__getitem__) if tokenizer.token_to_id(name) is None
    ]
    tokenizer.add_special_tokens(lacking)
    special = dict(beside.names)
    candidates = (special["eos"],) if "eos" in special else _KNOWN_EODS
    known = [name for name in candidates if tokenizer.token_to_id(name) is not None]
    if not known:
        raise InputError(
            f"{path}: has no {' or '.join(candidates)}; set eos_token in a tokenizer_config.json beside it"
        )
    special["eos"] = known[0]
    tokenizer.no_truncation()
    tokenizer.no_padding()
    before, after = _around(tokenizer)
    built = FastTokenizer(tokenizer, special, "huggingface", path, extra_ids=extra_ids)
    if built.cls_id is None or built.cls_id not in before:
        built.prefix, built.suffix = before, after
    return built


def _around(tokenizer: tokenizers.Tokenizer) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the tokens that a tokenizer puts before and after a text."""
    word = "a"
    if isinstance(tokenizer.model, models.WordLevel):  # such a model may fail on an unknown word
        word = min(tokenizer.get_vocab(with_added_tokens=False), default="")
    text = tokenizer.encode(word, add_special_tokens=False).ids
    whole = tokenizer.encode(word).ids
    first = next((at for at in range(len(whole)) if whole[at : at + len(text)] == text), 0)
    return tuple(whole[:first]), tuple(whole[first + len(text) :])


def bert_wordpiece(vocab: Path, lower_case: bool, extra_ids: int = 0, append_ends: bool = True) -> FastTokenizer:
    """Load a BERT vocab.txt (Megatron-LM's BertWordPieceLowerCase or BertWordPieceCase).

    With `append_ends`, [BOS] and [EOS] are appended and [EOS] ends a document; otherwise [SEP] ends it.
    """
    try:
        model = models.WordPiece.from_file(str(vocab), unk_token="[UNK]", max_input_chars_per_word=200)
    except Exception as error:  # the library raises nothing narrower
        raise InputError(f"{vocab}: not a WordPiece vocabulary ({error})") from None
    tokenizer = _bert_pipeline(model, lower_case)
    missing = [name for name in _BERT_PIECES if tokenizer.token_to_id(name) is None]
    if missing:
        raise InputError(f"{vocab}: has no {', '.join(missing)}: not the vocabulary of a BERT")
    names = dict(_BERT_NAMES)
    if append_ends:
        tokenizer.add_special_tokens(["[BOS]", "[EOS]"])
    else:
        del names["bos"]
        names["eos"] = "[SEP]"
    built = FastTokenizer(tokenizer, names, "bert_wordpiece", vocab, extra_ids=extra_ids)
    built.identity["lower_case"] = int(lower_case)
    return built


def _bert_pipeline(model: models.Model, lower_case: bool) -> tokenizers.Tokenizer:
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=lower_case)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    return tokenizer


def train_wordpiece(texts: Iterable[str], out_path: str | Path, vocab_size: int, lower_case: bool) -> None:
    """Train a WordPiece vocabulary of up to `vocab_size` pieces on some texts and write it as a vocab.txt.

    The same texts give the same file. All of them are held in memory: train on a part of a large corpus.

    Raises:
        InputError: the letters of the texts alone are more than `vocab_size` pieces.
    """
    texts = list(texts)
    # The library numbers letters in the order of its hash table and breaks ties by number, so their order is given.
    letters = sorted(_wordpieces(texts, len(_BERT_PIECES), _BERT_PIECES, lower_case))
    given = [*_BERT_PIECES, *(piece for piece in letters if piece not in _BERT_PIECES)]
    if len(given) > vocab_size:
        raise InputError(f"tokenizer.vocab_size {vocab_size}: this text has {len(given)} letters and special pieces")
    pieces = _wordpieces(texts, vocab_size, given, lower_case)
    out_path = Path(out_path)
    out_path.parent.mkdir(parents=True, exist_ok=True)
    write_text(out_path, "".join(f"{piece}\n" for piece in sorted(pieces, key=pieces.__getitem__)))


def _wordpieces(texts: Sequence[str], size: int, first: Sequence[str], lower_case: bool) -> dict[str, int]:
    """Return a trained vocabulary: `first`, then the commonest letters, then merges as far as `size` allows."""
    tokenizer = _bert_pipeline(models.WordPiece(unk_token="[UNK]"), lower_case)
    trainer = trainers.WordPieceTrainer(
        vocab_size=size, special_tokens=list(first), limit_alphabet=1000, show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer.get_vocab()
