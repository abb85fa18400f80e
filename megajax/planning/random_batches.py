"""Random global batches for every model family, the same under every layout: what comparisons of layouts train on.

Samples are of unequal lengths, so that no two microbatches need have as many tokens that count.

Shapes: G global batch, S sequence, T decoder sequence.
"""

from __future__ import annotations

import numpy as np

from megajax.config import Config
from megajax.data.dataset import Batch
from megajax.data.gpt import make_batch

EOD, DOCUMENT = 0, 16
"""End-of-document id, and mean length of a random document."""
PREDICTED = 0.2
"""Share of an encoder's tokens that are to be predicted."""


def random_batch(config: Config, step: int) -> Batch:
    """The global batch of a step."""
    make = {"gpt": _gpt, "bert": _bert, "t5": _t5}[config.model.family]
    G = config.train.global_batch_size
    assert config.model.vocab_size is not None
    batch = make(config, step, G, config.model.vocab_size)
    return {**batch, "sample_ids": (step * G + np.arange(G)).astype(np.uint32)}


def random_samples(step: int, count: int, sequence: int, vocabulary: int) -> list[np.ndarray]:
    """`count` samples [S + 1] of a step: documents one after the other."""
    rng = np.random.default_rng(step)
    tokens = rng.integers(0, vocabulary, (count, sequence + 1))
    return list(np.where(rng.random(tokens.shape) < 1 / DOCUMENT, EOD, tokens).astype(np.int32))


def _gpt(config: Config, step: int, G: int, vocabulary: int) -> Batch:
    """Samples of S / 2 to S + 1 tokens."""
    S = config.data.seq_length
    lengths = np.random.default_rng(step).integers(S // 2, S + 2, G)
    samples = random_samples(step, G, S, vocabulary)
    samples = [sample[:length] for sample, length in zip(samples, lengths, strict=True)]
    return make_batch(samples, np.arange(G), config.data, EOD)


def _bert(config: Config, step: int, G: int, vocabulary: int) -> Batch:
    """Pairs of texts of S / 2 to S tokens together; the last sample is an empty one."""
    rng = np.random.default_rng(step)
    text, lengths = _text(rng, G, config.data.seq_length, vocabulary)
    places = np.arange(text.shape[1], dtype=np.int32)
    second = places >= rng.integers(1, lengths)[:, None]
    real = places < lengths[:, None]
    counts = real & (rng.random(text.shape) < PREDICTED)
    pair_labels = rng.integers(0, 2, G, dtype=np.int32)
    counts[-1], pair_labels[-1] = False, -1
    batch = {
        "tokens": np.where(counts, vocabulary - 1, text),
        "labels": text,
        "loss_mask": counts.astype(np.float32),
        "positions": np.broadcast_to(places, text.shape),
        "token_types": (second & real & (config.model.token_types > 1)).astype(np.int32),
        "segment_ids": (~real).astype(np.int32),
    }
    return {**batch, "pair_labels": pair_labels} if config.model.pair_task else batch


def _t5(config: Config, step: int, G: int, vocabulary: int) -> Batch:
    """Texts of S / 2 to S tokens, and of T / 2 to T tokens for the decoder, which starts one token later."""
    rng = np.random.default_rng(step)
    text, lengths = _text(rng, G, config.data.seq_length, vocabulary)
    target, target_lengths = _text(rng, G, config.data.decoder_seq_length, vocabulary)
    padding = np.arange(text.shape[1]) >= lengths[:, None]
    target_padding = np.arange(target.shape[1]) >= target_lengths[:, None]
    return {
        "tokens": text,
        "segment_ids": padding.astype(np.int32),
        "decoder_tokens": np.roll(target, 1, axis=1),
        "labels": target,
        "loss_mask": 1 - target_padding.astype(np.float32),
        "decoder_segment_ids": target_padding.astype(np.int32),
    }


def _text(rng: np.random.Generator, G: int, S: int, vocabulary: int) -> tuple[np.ndarray, np.ndarray]:
    """Ids [G, S] and how many of each row are real [G], S / 2 to S."""
    return rng.integers(0, vocabulary, (G, S), dtype=np.int32), rng.integers(S // 2, S + 1, G)
