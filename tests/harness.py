"""Tiny models for `megajax.planning.equivalence`: train them in memory on any layout of the simulated devices."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from megajax.config import Config, DataConfig, ModelConfig, OptimConfig, ParallelConfig, TrainConfig
from megajax.planning import equivalence
from megajax.planning.equivalence import Compiled, Outcome, differences, gathered

__all__ = ["Outcome", "compile_layout", "gathered", "random_samples", "tiny_config", "train_layout", "worst"]

GPT = ModelConfig(num_layers=2, hidden_size=64, num_heads=8, max_positions=32, vocab_size=100)
LLAMA = replace(
    GPT, num_kv_heads=2, positions="rope", norm="rmsnorm", activation="swiglu", bias=False, tied_head=False,
    qk_norm=True, ffn_hidden_size=96,
)  # fmt: skip
BATCH, SEQUENCE = 8, 16


def tiny_config(model: ModelConfig = GPT, micro_batch_size: int = 1, **parts: Any) -> Config:
    """A configuration that trains on 8 samples of 16 tokens a step."""
    defaults = {
        "data": DataConfig(seq_length=SEQUENCE),
        "optim": OptimConfig(lr=1e-2, decay_style="constant", weight_decay=0.1),
        "train": TrainConfig(steps=5, global_batch_size=BATCH, micro_batch_size=micro_batch_size),
    }
    return Config(model=model, **(defaults | parts))


def random_samples(step: int, count: int = BATCH, sequence: int = SEQUENCE, vocab: int = 100) -> list[np.ndarray]:
    """Samples [S + 1] of a step, the same under every layout."""
    return equivalence.random_samples(step, count, sequence, vocab)


def compile_layout(config: Config, parallel: ParallelConfig) -> Compiled:
    """Initial state, train step, feed and rules on the first devices that the layout needs."""
    return equivalence.compile_layout(replace(config, parallel=parallel))


def train_layout(config: Config, parallel: ParallelConfig, steps: int = 5) -> Outcome:
    """Train `steps` steps on a layout."""
    return equivalence.train_layout(replace(config, parallel=parallel), steps)


def worst(a: dict[str, np.ndarray], b: dict[str, np.ndarray]) -> tuple[float, str]:
    """Largest difference of any tensor, relative to that tensor's largest entry, and its name."""
    return max((far, name) for name, far in differences(a, b).items())
