"""Raw samples to the arrays that the training step eats.

Shapes: B batch, S sequence.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from megajax.config.data import DataConfig
from megajax.data.dataset import Batch


def make_batch(samples: Sequence[np.ndarray], sample_ids: np.ndarray, config: DataConfig, eod: int) -> Batch:
    """Return the `token_batch` of B arrays of at most S+1 tokens each."""
    tokens = np.zeros((len(samples), config.seq_length + 1), np.int32)
    for row, sample in zip(tokens, samples, strict=True):
        row[: len(sample)] = sample
    return token_batch(tokens, np.array([len(sample) for sample in samples]), sample_ids, config, eod)


def token_batch(raw: np.ndarray, lengths: np.ndarray, sample_ids: np.ndarray, config: DataConfig, eod: int) -> Batch:
    """Derive labels, loss mask, positions and segments of all samples at once (Megatron-LM GPTDataset masks).

    What is padding follows from its place, never from its id: end-of-document targets keep their loss also where the
    tokenizer pads with that id.

    Args:
        raw: tokens int32 [B, S+1].
        lengths: how many of each row are real [B]; the rest of it is padding.
        sample_ids: their global sample numbers [B]; dropout keys follow from them.
        config: S and what happens at the end of a document.
        eod: end-of-document id.

    Returns:
        tokens, labels, positions int32 [B, S], loss_mask float32 [B, S], sample_ids uint32 [B]; with `reset_attention`
        also segment_ids int32 [B, S]: tokens attend to tokens of the same segment only. Tokens and labels are views of
        `raw`, positions may be one of a single row: most of the time of a batch would go into copying them.
    """
    tokens, labels = raw[:, :-1], raw[:, 1:]
    steps = np.arange(config.seq_length, dtype=np.int32)
    loss_mask = steps + 1 < lengths[:, None]
    positions = np.broadcast_to(steps, tokens.shape)
    segments = None
    if config.mask_eod_loss or config.reset_positions or config.reset_attention:
        ends = (tokens == eod) & (steps < lengths[:, None])
        begins = np.zeros_like(ends)
        begins[:, 1:] = ends[:, :-1]
        if config.mask_eod_loss:
            loss_mask &= ~ends
        if config.reset_positions:
            positions = steps - np.maximum.accumulate(np.where(begins, steps, 0), axis=1)
        if config.reset_attention:
            segments = np.cumsum(begins, axis=1, dtype=np.int32)
    batch = {
        "tokens": tokens,
        "labels": labels,
        "loss_mask": loss_mask.astype(np.float32),
        "positions": positions,
        # keys only need to differ within a few steps: wrapping after 4e9 samples is harmless
        "sample_ids": sample_ids.astype(np.uint32),
    }
    return batch if segments is None else {**batch, "segment_ids": segments}
