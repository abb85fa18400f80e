"""Interface of tokenizers, and the plainest one, whose text consists of token ids."""

from __future__ import annotations

import hashlib
import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from functools import cached_property
from pathlib import Path

import numpy as np
import tokenizers
from tokenizers import models, pre_tokenizers

from megajax.config.base import InputError

Identity = dict[str, str | int]
_SPACES = {"line ends": "\n", "tabs": "\t", "double spaces": "  "}
ROLES = ("eos", "bos", "pad", "unk", "cls", "sep", "mask")
"""Roles of special tokens, named as by Hugging Face."""


class Tokenizer(ABC):
    """Convert text to ids and back; an id is None if the tokenizer has no such token."""

    vocab_size: int
    """Number of ids before any padding of the vocabulary."""
    eod_id: int
    """Id of the end of a document, which also ends a generated text."""
    bos_id: int | None = None
    """Id of the beginning of a sequence."""
    pad_id: int | None = None
    """Id of padding."""
    unk_id: int | None = None
    """Id of text without a piece; None if every text has pieces."""
    cls_id: int | None = None
    """Id of the first token of a masked sample, whose output the sentence task reads."""
    sep_id: int | None = None
    """Id of the end of a part of a masked sample."""
    mask_id: int | None = None
    """Id that stands for a token to be predicted."""
    sentinel_ids: tuple[int, ...] = ()
    """Ids of <extra_id_0>, <extra_id_1>, ..., each of which stands for a span of tokens to be predicted."""
    prefix: tuple[int, ...] = ()
    """Ids before every document, prompt and text: the beginning of sequence, or none."""
    suffix: tuple[int, ...] = ()
    """Ids that the tokenizer puts after a text for an encoder: an end token, or none."""
    chat_template: str | None = None
    """Template of conversations (Jinja, as in tokenizer_config.json); None = the one of `corpus.chat`."""
    identity: Identity
    """Kind, size and hash of the contents, equal for two tokenizers that give the same ids."""

    @property
    def start_id(self) -> int | None:
        """Return the decoder's first token in a model with an encoder: beginning of sequence, or else padding."""
        return self.pad_id if self.bos_id is None else self.bos_id

    @abstractmethod
    def encode(self, text: str) -> list[int]:
        """Return the ids of a text."""

    @abstractmethod
    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the ids of some texts, in one call into native code."""

    @abstractmethod
    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of some ids."""

    def as_fast(self) -> tokenizers.Tokenizer:
        """Return a tokenizer of the `tokenizers` library that gives the same ids and puts nothing around a text.

        Raises:
            InputError: there is no such tokenizer.
        """
        raise InputError(f"a tokenizer of type {self.identity['type']} has no counterpart in the tokenizers library")

    def id_for(self, role: str) -> int | None:
        """Return the id of the special token of a role (`ROLES`), or None if there is none."""
        return self.eod_id if role == "eos" else getattr(self, f"{role}_id")

    def id_of(self, name: str) -> int | None:
        """Return the id of a special token such as `<fim_prefix>`, or None if there is none."""
        return self.special.get(name)

    @cached_property
    def special(self) -> dict[str, int]:
        """Return the ids of the special tokens, by name."""
        added = self.as_fast().get_added_tokens_decoder()
        return {token.content: i for i, token in added.items() if token.special}

    def encode_marked(self, text: str) -> list[int]:
        """Return the ids of a text in which the names of special tokens stand for these tokens, as in a chat prompt."""
        if not self.special:
            return self.encode(text)
        names = sorted(self.special, key=len, reverse=True)
        parts = re.split(f"({'|'.join(map(re.escape, names))})", text)
        texts = self.encode_batch(parts[::2])
        marks = [[self.special[name]] for name in parts[1::2]] + [[]]
        return [i for pair in zip(texts, marks, strict=True) for ids in pair for i in ids]

    def lost_spaces(self) -> dict[str, str]:
        """Return the kinds of space that become the same ids as a single space, by name, with their characters."""
        try:
            single, *others = self.encode_batch(["a b", *(f"a{spaces}b" for spaces in _SPACES.values())])
        except InputError:  # letters are not text for this tokenizer
            return {}
        unknown = set(single) == {self.unk_id}
        return {name: _SPACES[name] for name, ids in zip(_SPACES, others, strict=True) if ids == single and not unknown}

    def probes(self, texts: Iterable[str]) -> list[str]:
        """Return those of some texts that the tokenizer can read, and its own names; by default it can read all."""
        return [*texts, *(f"a{name}b {name}" for name in [*self.special][:20])]

    @cached_property
    def continuations(self) -> np.ndarray:
        """Return whether each piece continues the word before it (WordPiece's ##), bool [vocab_size]."""
        return np.zeros(self.vocab_size, bool)


def check_text(text: str, what: str) -> None:
    """Refuse text that no tokenizer can read: half a surrogate pair, which bytes that are not UTF-8 become as well.

    Raises:
        InputError: the text is not readable; the message names it as `what`.
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InputError(f"{what} is no text at character {error.start}: half a surrogate pair, or not UTF-8") from None


def sentinel_names(count: int) -> list[str]:
    """Return the names of T5's sentinels."""
    return [f"<extra_id_{i}>" for i in range(count)]


def file_identity(kind: str, vocab_size: int, *files: Path) -> Identity:
    """Return the identity of a tokenizer that is described by some files."""
    digest = hashlib.sha256(b"".join(hashlib.sha256(path.read_bytes()).digest() for path in files))
    return {"type": kind, "vocab_size": vocab_size, "sha256": digest.hexdigest()}


class NullTokenizer(Tokenizer):
    """Read ids as integers between spaces; id `ids` comes after them and ends a document, and sentinels follow it."""

    def __init__(self, ids: int, extra_ids: int = 0):
        self.eod_id, self.vocab_size = ids, ids + 1 + extra_ids
        self.sentinel_ids = tuple(range(ids + 1, self.vocab_size))
        self.identity = {"type": "null", "vocab_size": self.vocab_size}

    def encode(self, text: str) -> list[int]:
        """Return the ids written in a text."""
        try:
            ids = [int(word) for word in text.split()]
        except ValueError as error:
            raise InputError(f"tokenizer.type null reads integers between spaces: {error}") from None
        for i in ids:
            if not 0 <= i < self.eod_id:
                raise InputError(f"token id {i} is not below tokenizer.vocab_size {self.eod_id}")
        return ids

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the ids written in some texts."""
        return [self.encode(text) for text in texts]

    def decode(self, ids: Sequence[int]) -> str:
        """Return ids as text."""
        return " ".join(str(i) for i in ids)

    def as_fast(self) -> tokenizers.Tokenizer:
        """Return a tokenizer whose words are numbers."""
        words = {str(i): i for i in range(self.eod_id)} | {"<eod>": self.eod_id}
        made = tokenizers.Tokenizer(models.WordLevel(words))
        made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
        made.add_special_tokens(["<eod>", *sentinel_names(len(self.sentinel_ids))])
        return made

    def probes(self, texts: Iterable[str]) -> list[str]:
        """Return numbers, because this tokenizer reads no other text."""
        return ["", " ", f"0  {self.eod_id - 1}\n0"]
