"""Fill-in-the-middle: documents rearranged so that a left-to-right model learns to fill a gap.

A document is cut at two places into prefix, middle and suffix, and given as prefix, suffix, middle (PSM) or as suffix,
prefix, middle (SPM), with special tokens between. Bavarian et al. (2022), section 3; the details are Megatron-LM's
GPTFIMDataset, but for the random numbers: they follow from seed and sample number, not from the order of reading.
Shapes: B batch, S sequence.
"""

from __future__ import annotations

import numpy as np

from megajax.config.base import ConfigError
from megajax.config.data import DataConfig
from megajax.data.tokenizers import Tokenizer

_ROLES = ("prefix", "middle", "suffix")
_SPELLINGS = ("<fim_{}>", "<|fim_{}|>")


class FillInTheMiddle:
    """Rearranges the documents of samples.

    Args:
        config: how often, and how often suffix first.
        tokenizer: cuts are made between characters, not between tokens.
        seed: what follows from it besides the sample number.

    Raises:
        ConfigError: the tokenizer has no special tokens for it.
    """

    def __init__(self, config: DataConfig, tokenizer: Tokenizer, seed: int):
        self._rate, self._spm_rate = config.fim_rate, config.fim_spm_rate
        self._tokenizer, self._seed = tokenizer, seed
        self._ids = _special_ids(tokenizer)

    def __call__(self, rows: np.ndarray, sample_ids: np.ndarray) -> np.ndarray:
        """Rearrange rows [B, S+1] in place; return how many tokens of each are left or fit in, [B]."""
        lengths = np.empty(len(rows), np.int64)
        for i, (row, sample) in enumerate(zip(rows, sample_ids.tolist(), strict=True)):
            tokens = self.rearranged(row, sample)[: len(row)]
            lengths[i] = len(tokens)
            row[: len(tokens)] = tokens
            row[len(tokens) :] = 0
        return lengths

    def rearranged(self, tokens: np.ndarray, sample: int) -> np.ndarray:
        """Return the tokens of a sample with some of its documents rearranged, of any length."""
        rng = np.random.RandomState((self._seed, sample))
        documents = np.split(tokens, np.flatnonzero(tokens == self._tokenizer.eod_id) + 1)
        return np.concatenate([self._document(document, rng) for document in documents])

    def _document(self, document: np.ndarray, rng: np.random.RandomState) -> np.ndarray:
        end = np.count_nonzero(document == self._tokenizer.eod_id)  # where it was cut: 0 or 1
        body = document[: len(document) - end]
        if not body.size or not rng.binomial(1, self._rate):
            return document
        text = self._tokenizer.decode(body.tolist())
        a, b = sorted(rng.randint(0, len(text) + 1, 2))
        suffix_first = rng.binomial(1, self._spm_rate)
        if "\ufffd" in text:
            return document  # the sample begins or ends within a character
        prefix, middle, suffix = self._tokenizer.encode_batch([text[:a], text[a:b], text[b:]])
        P, M, S = self._ids
        parts = [P, S, *suffix, M, *prefix, *middle] if suffix_first else [P, *prefix, S, *suffix, M, *middle]
        return np.concatenate([np.array(parts, document.dtype), document[len(body) :]])


def _special_ids(tokenizer: Tokenizer) -> tuple[int, ...]:
    for spelling in _SPELLINGS:
        ids = [tokenizer.id_of(spelling.format(role)) for role in _ROLES]
        found = tuple(i for i in ids if i is not None)
        if len(found) == len(_ROLES):
            return found
    names = ", ".join(_SPELLINGS[0].format(role) for role in _ROLES)
    raise ConfigError(f"data.fim_rate needs a tokenizer with {names}: add them to it, or set data.fim_rate to 0")
