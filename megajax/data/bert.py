"""BERT samples: pairs of text parts, with masked tokens to predict and the order of the parts to find.

Every sample equals that of Megatron-LM's BERTMaskedWordPieceDataset (Devlin et al., "BERT", 2019). The pair task is
that of Lan et al., "ALBERT" (2020). Without it a sample is one part, as in Liu et al., "RoBERTa" (2019).
Shapes: B batch, S sequence, V vocabulary.
"""

from __future__ import annotations

import numpy as np

from megajax.config.base import InputError
from megajax.config.data import DataConfig
from megajax.data.dataset import Batch
from megajax.data.indexed import IndexedDataset, Selection
from megajax.data.mapping import SentenceMap
from megajax.data.masking import draw_spans, inverse_length, masking_budget, whole_words
from megajax.data.tokenizers import Tokenizer


class BertDataset:
    """Provide samples of masked text.

    Args:
        selection: documents of the file, one sequence per sentence.
        config: sequence length, masking and short samples.
        tokenizer: tokenizer with the special ids.
        pair_task: whether samples have two parts, whose order is to be found.

    Raises:
        InputError: the tokenizer has no id for a mask, or no document has enough sentences.
    """

    def __init__(self, selection: Selection[IndexedDataset], config: DataConfig, tokenizer: Tokenizer, pair_task: bool):
        self._config, self._pair_task, self._seed = config, pair_task, selection.seed
        self._cls, self._sep = required_id(tokenizer, "cls"), required_id(tokenizer, "sep")
        self._mask, self._pad = required_id(tokenizer, "mask"), tokenizer.pad_id or 0
        self._vocab_size, self._continuations = tokenizer.vocab_size, tokenizer.continuations
        longest = config.seq_length - 3  # [CLS] and two [SEP]
        min_sentences = 2 if pair_task else 1
        self._map = SentenceMap(selection, longest, config.short_seq_prob, min_sentences, tokenizer.vocab_size)
        self.epochs = self._map.epochs

    def __len__(self) -> int:
        return len(self._map)

    def batch(self, sample_ids: np.ndarray) -> Batch:
        """Return the rows of these samples [B]; a number past the end gives a row of padding.

        Returns:
            tokens, labels, positions, token_types int32 [B, S]; loss_mask float32 [B, S], 1 where a token is predicted;
            segment_ids int32 [B, S], 0 for text and 1 for padding; sample_ids uint32 [B]; with the pair task
            pair_labels int32 [B], 1 where the parts are swapped and -1 in a row of padding.
        """
        B, S = len(sample_ids), self._config.seq_length
        batch = {
            "tokens": np.full((B, S), self._pad, np.int32),
            "labels": np.zeros((B, S), np.int32),
            "loss_mask": np.zeros((B, S), np.float32),
            "positions": np.tile(np.arange(S, dtype=np.int32), (B, 1)),
            "token_types": np.zeros((B, S), np.int32),
            "segment_ids": np.ones((B, S), np.int32),
            "sample_ids": sample_ids.astype(np.uint32),
        }
        if self._pair_task:
            batch["pair_labels"] = np.full(B, -1, np.int32)
        for row, sample in enumerate(sample_ids.tolist()):
            if sample < len(self):
                self._fill({key: rows[row : row + 1] for key, rows in batch.items()}, sample)
        return batch

    def _fill(self, row: Batch, sample: int) -> None:
        """Write one sample into its row."""
        sentences, target = self._map.read(sample)
        rng = np.random.RandomState((self._seed + sample) % 2**32)
        parts, swapped = self._parts(sentences, rng)
        parts = _shortened(parts, target, rng)
        cls, sep = np.array([[self._cls], [self._sep]])
        pieces = [cls, parts[0], sep, parts[1], sep]
        original = np.concatenate(pieces if len(parts[1]) else pieces[:3]).astype(np.int32)
        t = len(original)
        row["tokens"][0, :t] = original
        row["token_types"][0, len(parts[0]) + 2 : t] = 1
        row["segment_ids"][0, :t] = 0
        if self._pair_task:
            row["pair_labels"][0] = swapped
        budget = masking_budget(self._config.mask_prob, t, target)
        words = whole_words(original, self._continuations, (self._cls, self._sep))
        places: list[int] = []
        shown: list[int] = []
        for run in draw_spans(words, budget, inverse_length, rng):
            places += run
            shown += [self._replacement(token, rng) for token in original[run].tolist()]
        row["tokens"][0, places] = shown
        row["labels"][0, places] = original[places]
        row["loss_mask"][0, places] = 1.0

    def _parts(self, sentences: list[np.ndarray], rng: np.random.RandomState) -> tuple[list[np.ndarray], bool]:
        """Cut the sentences into two parts, swapped half of the time, and tell whether they are; without the pair task,
        keep one.
        """
        pivot, swapped = len(sentences), False
        if self._pair_task:
            pivot = rng.randint(1, len(sentences)) if len(sentences) > 2 else 1
            swapped = rng.random_sample() < 0.5
        empty = np.empty(0, np.int32)
        parts = [np.concatenate([empty, *sentences[:pivot]]), np.concatenate([empty, *sentences[pivot:]])]
        return parts[::-1] if swapped else parts, swapped

    def _replacement(self, token: int, rng: np.random.RandomState) -> int:
        """Return the input id of a token to be predicted: mask (80 %), any id (10 %) or the token itself (10 %)."""
        if rng.random_sample() < 0.8:
            return self._mask
        return rng.randint(0, self._vocab_size) if rng.random_sample() >= 0.5 else token


def required_id(tokenizer: Tokenizer, role: str) -> int:
    """Return the id of a role ("mask", "cls", ...) that masked text needs."""
    found = getattr(tokenizer, f"{role}_id")
    if found is None:
        raise InputError(
            f"tokenizer.type {tokenizer.identity['type']} has no {role} id, which masked text needs: "
            "set tokenizer.special_ids=true (sentencepiece), or use bert_wordpiece"
        )
    return found


def _shortened(parts: list[np.ndarray], target: int, rng: np.random.RandomState) -> list[np.ndarray]:
    """Drop tokens until both parts together have `target`, each from a random end of the part that is longer then."""
    ends = [[0, len(part)] for part in parts]
    sizes = [len(part) for part in parts]
    for _ in range(sum(sizes) - target):
        longer = 0 if sizes[0] > sizes[1] else 1
        sizes[longer] -= 1
        if rng.random_sample() < 0.5:
            ends[longer][0] += 1
        else:
            ends[longer][1] -= 1
    return [part[start:stop] for part, (start, stop) in zip(parts, ends, strict=True)]
