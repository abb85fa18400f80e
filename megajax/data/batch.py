"""Raw samples to the arrays that the training step eats.

Shapes: B batch, S sequence.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from megajax.config.data import DataConfig

Batch = dict[str, np.ndarray]


def make_batch(samples: Sequence[np.ndarray], sample_ids: np.ndarray, config: DataConfig, eod: int) -> Batch:
    """Stack samples and derive labels, loss mask, positions and segments (Megatron-LM GPTDataset masks).

    A sample of fewer than S+1 tokens is padded at its end. What is padding follows from its place, never from its id:
    end-of-document targets keep their loss also where the tokenizer pads with that id.

    Args:
        samples: B arrays of at most S+1 real tokens.
        sample_ids: their global sample numbers [B]; dropout keys follow from them.
        config: S and what happens at the end of a document.
        eod: end-of-document id.

    Returns:
        tokens, labels, positions int32 [B, S], loss_mask float32 [B, S], sample_ids uint32 [B]; with `reset_attention`
        also segment_ids int32 [B, S]: tokens attend to tokens of the same segment only.
    """
    S = config.seq_length
    raw = np.zeros((len(samples), S + 1), np.int32)
    for row, sample in zip(raw, samples, strict=True):
        row[: len(sample)] = sample
    lengths = np.array([len(sample) for sample in samples])[:, None]
    tokens, labels = raw[:, :-1], raw[:, 1:]
    steps = np.arange(S, dtype=np.int32)
    ends = (tokens == eod) & (steps < lengths)
    begins = np.zeros_like(ends)
    begins[:, 1:] = ends[:, :-1]

    loss_mask = steps + 1 < lengths
    if config.mask_eod_loss:
        loss_mask &= ~ends
    positions = np.broadcast_to(steps, tokens.shape)
    if config.reset_positions:
        positions = steps - np.maximum.accumulate(np.where(begins, steps, 0), axis=1)
    batch = {
        "tokens": np.ascontiguousarray(tokens),
        "labels": np.ascontiguousarray(labels),
        "loss_mask": loss_mask.astype(np.float32),
        "positions": np.ascontiguousarray(positions),
        # keys only need to differ within a few steps: wrapping after 4e9 samples is harmless
        "sample_ids": sample_ids.astype(np.uint32),
    }
    if config.reset_attention:
        batch["segment_ids"] = np.cumsum(begins, axis=1, dtype=np.int32)
    return batch
