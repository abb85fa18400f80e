"""What the rest of the system knows of a tokenizer."""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path

import numpy as np

Identity = dict[str, str | int]


class Tokenizer(ABC):
    """Text to ids and back; where an id is None the tokenizer has no such piece."""

    vocab_size: int
    """Number of ids, before any padding of the vocabulary."""
    eod_id: int
    """End of document; also ends a generated text."""
    bos_id: int | None = None
    """Beginning of sequence."""
    pad_id: int | None = None
    """Padding."""
    unk_id: int | None = None
    """What text without a piece turns into; None where every text has pieces."""
    cls_id: int | None = None
    """First token of a sample of masked text; the sentence task reads its output."""
    sep_id: int | None = None
    """End of a part of such a sample."""
    mask_id: int | None = None
    """Stands for a token to be predicted."""
    sentinel_ids: tuple[int, ...] = ()
    """<extra_id_0>, <extra_id_1>, ...: each stands for a span of tokens to be predicted."""
    identity: Identity
    """Kind, size and hash of the contents: equal for two tokenizers that give the same ids."""

    @abstractmethod
    def encode(self, text: str) -> list[int]:
        """Return the ids of a text."""

    @abstractmethod
    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the ids of some texts; one call into native code for all of them."""

    @abstractmethod
    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of some ids."""

    def id_of(self, name: str) -> int | None:
        """Return the id of a special token such as `<fim_prefix>`; None where there is none."""
        return None

    @cached_property
    def continuations(self) -> np.ndarray:
        """Whether a piece goes on with the word before it (WordPiece's ##), bool [vocab_size]."""
        return np.zeros(self.vocab_size, bool)


def sentinel_names(count: int) -> list[str]:
    """Names of T5's sentinels."""
    return [f"<extra_id_{i}>" for i in range(count)]


def file_identity(kind: str, vocab_size: int, *files: Path) -> Identity:
    """Identity of a tokenizer that some files describe."""
    digest = hashlib.sha256(b"".join(hashlib.sha256(path.read_bytes()).digest() for path in files))
    return {"type": kind, "vocab_size": vocab_size, "sha256": digest.hexdigest()}
