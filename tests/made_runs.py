"""Runs that were never trained: checkpoints of random weights, written in a second."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import jax
import numpy as np

from megajax.checkpoint.store import Checkpoints
from megajax.config import Config, DataConfig, ModelConfig, TokenizerConfig, TrainConfig, dump_config
from megajax.config.config import CheckpointConfig
from megajax.data.tokenizers import build_tokenizer, train_sentencepiece
from megajax.models.families import build_model

MODEL = ModelConfig(num_layers=2, hidden_size=32, num_heads=4, max_positions=32)


def make_run(
    directory: Path,
    texts: Sequence[str] = (),
    model: ModelConfig = MODEL,
    vocab_size: int = 300,
    scale: float = 0.5,
    tokenizer: TokenizerConfig | None = None,
) -> Path:
    """A run directory with weights of standard deviation `scale`.

    Args:
        directory: of the run, made here.
        texts: what a tokenizer of `vocab_size` pieces is made from; none = text is ids below `vocab_size` - 1.
        model: its shape.
        vocab_size: ids.
        tokenizer: with `vocab_size` ids, instead of either.
        scale: 0.5 makes tokens that differ and probabilities that are not all alike.
    """
    directory.mkdir(parents=True)
    tokenizer = tokenizer or TokenizerConfig(type="null", vocab_size=vocab_size - 1)
    if texts:
        tokenizer = TokenizerConfig(type="sentencepiece", model=str(directory / "tokenizer.model"))
        train_sentencepiece(texts, str(tokenizer.model), vocab_size)
    config = Config(
        output_dir=str(directory), model=model, tokenizer=tokenizer, data=DataConfig(seq_length=16),
        train=TrainConfig(steps=1),
    )  # fmt: skip
    (directory / "config.yaml").write_text(dump_config(config))
    shape = replace(model, vocab_size=vocab_size)
    rng = np.random.default_rng(0)
    like = jax.eval_shape(lambda: build_model(jax.random.key(0), shape))
    weights = jax.tree.map(lambda x: jax.numpy.asarray(rng.normal(scale=scale, size=x.shape), x.dtype), like)
    record = {"step": 1, "consumed_samples": 0, "tokenizer": build_tokenizer(tokenizer).identity}
    with Checkpoints(directory / "checkpoints", CheckpointConfig(asynchronous=False)) as checkpoints:
        checkpoints.save(1, {"params": weights}, record)
    return directory
