"""Text that is token ids already."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import tokenizers
from tokenizers import models, pre_tokenizers

from megajax.config.base import InputError
from megajax.data.tokenizers.tokenizer import Tokenizer, sentinel_names


class NullTokenizer(Tokenizer):
    """Ids as integers between spaces; id `ids` comes after them and ends a document, sentinels come after that."""

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
        """Write ids as text."""
        return " ".join(str(i) for i in ids)

    def as_fast(self) -> tokenizers.Tokenizer:
        """Return a tokenizer whose words are the numbers."""
        words = {str(i): i for i in range(self.eod_id)} | {"<eod>": self.eod_id}
        made = tokenizers.Tokenizer(models.WordLevel(words))
        made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
        made.add_special_tokens(["<eod>", *sentinel_names(len(self.sentinel_ids))])
        return made

    def probes(self, texts: Iterable[str]) -> list[str]:
        """Return numbers: nothing else is text here."""
        return ["", " ", f"0  {self.eod_id - 1}\n0"]
