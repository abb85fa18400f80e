"""T5 samples: text with spans cut out, and the spans as targets.

Every sample equals that of Megatron-LM's T5MaskedWordPieceDataset, with spans sorted by place (Raffel et al., "T5",
2020, section 3.1.4). For the text "a b c d e" with the spans "b c" and "e" and the sentinels <0>, <1>, ...:

    encoder   a <0> d <1>
    decoder   start <0> b c <1> e
    labels    <0> b c <1> e end

Tokens that the tokenizer of an imported model puts after texts (T5's own: an end) follow the encoder's text as well.
Shapes: B batch, S sequence of the encoder, T sequence of the decoder.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from megajax.config.base import InputError
from megajax.config.data import DataConfig
from megajax.data.dataset import Batch
from megajax.data.indexed import IndexedDataset, Selection
from megajax.data.mapping import SentenceMap
from megajax.data.masking import draw_spans, geometric_length, masking_budget, whole_words
from megajax.data.tokenizers import Tokenizer


class T5Dataset:
    """Provide samples of text with missing spans.

    Args:
        selection: documents of the file, one sequence per sentence.
        config: sequence lengths, masking and short samples.
        tokenizer: tokenizer with the sentinels, the start (its beginning of sequence, else its padding) and the end.

    Raises:
        InputError: the tokenizer has no sentinels or no start token, or no document has text.
    """

    def __init__(self, selection: Selection[IndexedDataset], config: DataConfig, tokenizer: Tokenizer):
        self._config, self._seed = config, selection.seed
        self._sentinels, self._continuations = tokenizer.sentinel_ids, tokenizer.continuations
        if not self._sentinels:
            raise InputError(
                "t5 data marks missing spans by sentinels, and there are none: set tokenizer.extra_ids=100"
            )
        start = tokenizer.start_id
        if start is None:
            raise InputError(f"tokenizer.type {tokenizer.identity['type']} has no id for a t5 decoder to start with")
        self._suffix = tokenizer.suffix  # there is room: the text is two tokens shorter than the sample
        self._start, self._end, self._pad = start, tokenizer.eod_id, tokenizer.pad_id or 0
        longest = config.seq_length - 2
        self._map = SentenceMap(selection, longest, config.short_seq_prob, 1, tokenizer.vocab_size)
        self.epochs = self._map.epochs

    def __len__(self) -> int:
        return len(self._map)

    def batch(self, sample_ids: np.ndarray) -> Batch:
        """Return the rows of these samples [B]; a number past the end gives a row of padding.

        Returns:
            tokens, segment_ids int32 [B, S] of the encoder; decoder_tokens, labels, decoder_segment_ids int32 [B, T]
            and loss_mask float32 [B, T] of the decoder; sample_ids uint32 [B]. Segments are 0 for text and 1 for
            padding.
        """
        B, S, T = len(sample_ids), self._config.seq_length, self._config.decoder_seq_length
        batch = {
            "tokens": np.full((B, S), self._pad, np.int32),
            "segment_ids": np.ones((B, S), np.int32),
            "decoder_tokens": np.full((B, T), self._pad, np.int32),
            "labels": np.zeros((B, T), np.int32),
            "loss_mask": np.zeros((B, T), np.float32),
            "decoder_segment_ids": np.ones((B, T), np.int32),
            "sample_ids": sample_ids.astype(np.uint32),
        }
        for row, sample in enumerate(sample_ids.tolist()):
            if sample >= len(self):
                continue
            text, spans = self._sample(sample)
            s, t = len(text), len(spans) + 1
            batch["tokens"][row, :s] = text
            batch["segment_ids"][row, :s] = 0
            batch["decoder_tokens"][row, :t] = [self._start, *spans]
            batch["labels"][row, :t] = [*spans, self._end]
            batch["loss_mask"][row, :t] = 1.0
            batch["decoder_segment_ids"][row, :t] = 0
        return batch

    def _sample(self, sample: int) -> tuple[list[int], list[int]]:
        """Return the text with sentinels in place of its spans, and the spans, each after its sentinel."""
        sentences, target = self._map.read(sample)
        tokens = np.concatenate(sentences)[:target]
        text: list[int] = []
        missing: list[int] = []
        rest = 0
        for sentinel, span in zip(self._sentinels, sorted(self._spans(tokens, target, sample)), strict=False):
            text += [*tokens[rest : span[0]].tolist(), sentinel]
            missing += [sentinel, *tokens[span].tolist()]
            rest = span[-1] + 1
        return [*text, *tokens[rest:].tolist(), *self._suffix], missing

    def _spans(self, tokens: np.ndarray, target: int, sample: int) -> Iterator[list[int]]:
        """Draw spans as long as the decoder has room and there are sentinels (without room Megatron fails)."""
        rng = np.random.RandomState((self._seed + sample) % 2**32)
        budget = masking_budget(self._config.mask_prob, len(tokens), target)
        words = whole_words(tokens, self._continuations, special=())
        room = self._config.decoder_seq_length - 1
        for span, _ in zip(draw_spans(words, budget, geometric_length, rng), self._sentinels, strict=False):
            room -= 1 + len(span)
            if room < 0:
                return
            yield span
