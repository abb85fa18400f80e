"""SentencePiece tokenizers, and their training."""

from __future__ import annotations

import io
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from pathlib import Path

import sentencepiece
import tokenizers

from megajax.config.base import InputError
from megajax.data.tokenizers.beside import read_beside
from megajax.data.tokenizers.convert import from_sentencepiece
from megajax.data.tokenizers.tokenizer import Tokenizer, file_identity, sentinel_names
from megajax.files import atomic_write


class SentencePieceTokenizer(Tokenizer):
    """Tokenize with a SentencePiece model; `</s>` ends a document (Megatron-LM's GPTSentencePieceTokenizer).

    Args:
        path: path of the .model file.
        special_ids: whether to append those of <CLS>, <SEP>, <EOD>, <MASK>, padding, beginning and end that the model
            lacks, in this order; <EOD> then ends a document (Megatron-LM's SentencePieceTokenizer).
        extra_ids: number of T5 sentinels, appended last.
        descending: whether the last sentinel has the lowest id, as in T5's own vocabulary.

    Tokens that files beside the model list as added to the vocabulary come right after it.
    """

    def __init__(self, path: Path, special_ids: bool = False, extra_ids: int = 0, descending: bool = False):
        try:
            self._model = sentencepiece.SentencePieceProcessor(model_proto=path.read_bytes())
        except RuntimeError as error:
            raise InputError(f"{path}: not a SentencePiece model ({error})") from None
        beside = read_beside(path)
        self._added = self._appended(path, beside.added)
        self.bos_id, self.pad_id = _present(self._model.bos_id()), _present(self._model.pad_id())
        self.unk_id = _present(self._model.unk_id())
        if special_ids:
            self.cls_id, self.sep_id, self.eod_id, self.mask_id = map(self._id, ("<CLS>", "<SEP>", "<EOD>", "<MASK>"))
            self.pad_id = self._id("<PAD>") if self.pad_id is None else self.pad_id
            self.bos_id = self._id("<BOS>") if self.bos_id is None else self.bos_id
            if self._model.eos_id() < 0:
                self._id("<EOS>")  # not used here, but counted by Megatron
        elif self._model.eos_id() < 0:
            raise InputError(f"{path}: has no end-of-sentence piece to end documents with: set tokenizer.special_ids")
        else:
            self.eod_id = self._model.eos_id()
        sentinels = sentinel_names(extra_ids)
        for name in reversed(sentinels) if descending else sentinels:
            self._id(name)
        self.sentinel_ids = tuple(map(self._id, sentinels))
        if beside.adds_bos and self.bos_id is not None:
            self.prefix = (self.bos_id,)
        if beside.adds_eos or (descending and beside.adds_eos is None):
            self.suffix = (self.eod_id,)
        self.vocab_size = len(self._model) + len(self._added)
        self.identity = file_identity("sentencepiece", self.vocab_size, path)
        if descending:
            self.identity["descending"] = 1

    def _appended(self, path: Path, added: dict[str, int]) -> list[str]:
        """List the names of the added tokens that the model lacks, in the order of their ids.

        Raises:
            InputError: no token has an id between theirs.
        """
        size = len(self._model)
        behind = sorted((i, name) for name, i in added.items() if i >= size)
        if [i for i, _ in behind] != list(range(size, size + len(behind))):
            raise InputError(f"{path.parent}: ids of added tokens do not follow the {size} of {path.name} one by one")
        return [name for _, name in behind]

    def _id(self, name: str) -> int:
        """Return the id of a piece, which is appended if the model lacks it."""
        if (found := self.id_of(name)) is not None:
            return found
        self._added.append(name)
        return len(self._model) + len(self._added) - 1

    def encode(self, text: str) -> list[int]:
        """Return the ids of a text."""
        return self._model.encode(text)

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the ids of some texts."""
        return self._model.encode(list(texts), num_threads=1)

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of some ids; control pieces have no text, and appended pieces have their name."""
        size, text = len(self._model), ""
        for is_piece, group in groupby(map(int, ids), lambda i: i < size):
            run = list(group)
            text += self._model.decode(run) if is_piece else "".join(self._added[i - size] for i in run)
        return text

    def id_of(self, name: str) -> int | None:
        """Return the id of a piece, or None if there is no such piece."""
        if name in self._added:
            return len(self._model) + self._added.index(name)
        found = self._model.piece_to_id(name)
        return found if self._model.id_to_piece(found) == name else None

    def as_fast(self) -> tokenizers.Tokenizer:
        """Return a tokenizer of the `tokenizers` library with the same pieces and results (`convert`)."""
        made = from_sentencepiece(self._model.serialized_model_proto())
        made.add_special_tokens(self._added)
        return made


def _present(piece: int) -> int | None:
    return piece if piece >= 0 else None


def train_sentencepiece(texts: Iterable[str], out_path: str | Path, vocab_size: int) -> None:
    """Train a lossless BPE with byte fallback on some texts and write it as a SentencePiece .model.

    Nothing is normalised, and bytes stand for text without a piece, line ends included: `decode(encode(text)) == text`
    for every text without U+2581, SentencePiece's own sign for a space. The same texts give the same file. All of them
    are held in memory: train on a part of a large corpus.

    Raises:
        InputError: there is no text, or too little or too much for that many pieces.
    """
    model = io.BytesIO()
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=_lines(texts),
            model_writer=model,
            model_type="bpe",
            vocab_size=vocab_size,
            byte_fallback=True,
            character_coverage=1.0,
            normalization_rule_name="identity",
            remove_extra_whitespaces=False,
            add_dummy_prefix=False,
            num_threads=1,
            minloglevel=2,
        )
    except RuntimeError as error:
        reason = str(error).rpartition("] ")[2] or "there is none"
        raise InputError(f"tokenizer.vocab_size {vocab_size}: not that many pieces in this text: {reason}") from None
    out_path = Path(out_path)
    out_path.parent.mkdir(parents=True, exist_ok=True)
    with atomic_write(out_path) as file:
        file.write(model.getvalue())


def _lines(texts: Iterable[str]) -> Iterator[str]:
    """Cut texts at line ends, and lines at SentencePiece's limit of 4,192 bytes, beyond which it would drop them."""
    for text in texts:
        for line in text.split("\n"):
            for start in range(0, len(line), 1000):
                yield line[start : start + 1000]
