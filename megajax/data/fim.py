"""Fill-in-the-middle: documents rearranged so that a left-to-right model learns to fill a gap.

A document is cut at two places into prefix, middle and suffix, and given as prefix, suffix, middle (PSM) or as suffix,
prefix, middle (SPM), with special tokens between (Bavarian et al., 2022, section 3). The details are those of
Megatron-LM's GPTFIMDataset, except for the random numbers: they follow from seed and sample number, not from the order
of reading. Shapes: B batch, S sequence.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from megajax.config.base import InputError
from megajax.config.data import DataConfig
from megajax.data.tokenizers import Tokenizer

_ROLES = ("prefix", "middle", "suffix")
_SPELLINGS = ("<fim_{}>", "<|fim_{}|>")


class FillInTheMiddle:
    """Rearrange the documents of samples.

    Args:
        config: rates of rearranging and of SPM, and names of the special tokens.
        tokenizer: tokenizer of the text, which is cut between characters and not between tokens.
        seed: seed from which, together with the sample number, the random numbers follow.

    Raises:
        InputError: the tokenizer has no special tokens for fill-in-the-middle.
    """

    def __init__(self, config: DataConfig, tokenizer: Tokenizer, seed: int):
        self._rate, self._spm_rate = config.fim_rate, config.fim_spm_rate
        self._tokenizer, self._seed, self._prefix = tokenizer, seed, tokenizer.prefix
        self._ids = _special_ids(tokenizer, config.fim_tokens)

    def __call__(self, rows: np.ndarray, sample_ids: np.ndarray) -> np.ndarray:
        """Rearrange rows [B, S+1] in place, and return how many tokens of each row are real, [B]."""
        lengths = np.empty(len(rows), np.int64)
        for i, (row, sample) in enumerate(zip(rows, sample_ids.tolist(), strict=True)):
            tokens = self.rearranged(row, sample)[: len(row)]
            lengths[i] = len(tokens)
            row[: len(tokens)] = tokens
            row[len(tokens) :] = 0
        return lengths

    def rearranged(self, tokens: np.ndarray, sample: int) -> np.ndarray:
        """Return the tokens of a sample, of any number, with some of its documents rearranged."""
        rng = np.random.RandomState((self._seed, sample))
        documents = np.split(tokens, np.flatnonzero(tokens == self._tokenizer.eod_id) + 1)
        return np.concatenate([self._document(document, rng) for document in documents])

    def _document(self, document: np.ndarray, rng: np.random.RandomState) -> np.ndarray:
        end = np.count_nonzero(document == self._tokenizer.eod_id)  # 0 if the sample ends within the document, else 1
        begun = tuple(document[: len(self._prefix)].tolist()) == self._prefix
        head = document[: len(self._prefix)] if begun else document[:0]
        body = document[len(head) : len(document) - end]
        if not body.size or not rng.binomial(1, self._rate):
            return document
        text = self._tokenizer.decode(body.tolist())
        a, b = sorted(rng.randint(0, len(text) + 1, 2))
        suffix_first = rng.binomial(1, self._spm_rate)
        if "\ufffd" in text:
            return document  # the sample begins or ends within a character: leave it
        prefix, middle, suffix = self._tokenizer.encode_batch([text[:a], text[a:b], text[b:]])
        P, M, S = self._ids
        parts = [P, S, *suffix, M, *prefix, *middle] if suffix_first else [P, *prefix, S, *suffix, M, *middle]
        return np.concatenate([head, np.array(parts, document.dtype), document[len(head) + len(body) :]])


def _special_ids(tokenizer: Tokenizer, names: Sequence[str]) -> tuple[int, ...]:
    """Return the ids of prefix, middle and suffix, by the user's names or the usual ones."""
    if names and len(names) != len(_ROLES):
        raise InputError(f"data.fim_tokens has {len(names)} names: expected those of prefix, middle and suffix")
    tried = [tuple(names)] if names else [tuple(spelling.format(role) for role in _ROLES) for spelling in _SPELLINGS]
    for spelt in tried:
        ids = [tokenizer.id_of(name) for name in spelt]
        found = tuple(i for i in ids if i is not None)
        if len(found) == len(_ROLES):
            return found
    missing = " or ".join(", ".join(name for name in spelt if tokenizer.id_of(name) is None) for spelt in tried)
    raise InputError(
        f"data.fim_rate: the tokenizer has no token {missing}: name three that it has as data.fim_tokens (for prefix, "
        "middle, suffix; unused ones will do), list them in an added_tokens.json beside it, or set data.fim_rate to 0"
    )
