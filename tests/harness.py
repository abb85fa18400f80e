"""Train a tiny GPT in memory on any layout of the simulated devices, and compare what comes out."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import numpy as np

from megajax.config import Config, DataConfig, ModelConfig, OptimConfig, ParallelConfig, TrainConfig, resolve_mesh
from megajax.data.batch import make_batch
from megajax.models.parameters import named_leaves
from megajax.parallel.mesh import build_mesh
from megajax.parallel.rules import Rules
from megajax.training.feed import Feed
from megajax.training.schedule import Schedule
from megajax.training.step import batch_shardings, build_init, build_train_step

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
    return list(np.random.default_rng(step).integers(0, vocab, (count, sequence + 1)).astype(np.int32))


@dataclass
class Outcome:
    """What a layout computed, gathered to numpy."""

    initial: dict[str, np.ndarray]
    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    first: dict[str, np.ndarray] = field(default_factory=dict)
    final: dict[str, np.ndarray] = field(default_factory=dict)

    @property
    def first_gradients(self) -> dict[str, np.ndarray]:
        """AdamW's first moment after one step is (1 - beta1) times the gradient."""
        return {name: value for name, value in self.first.items() if name.startswith("opt_state.mu.")}


def gathered(tree: Any) -> dict[str, np.ndarray]:
    """Every array of a state by name, on the host."""
    return {name: np.asarray(jax.device_get(leaf[...])) for name, leaf in named_leaves(tree)}


def compile_layout(config: Config, parallel: ParallelConfig) -> tuple[Any, Any, Feed, Rules]:
    """Initial state, train step and feed on the first devices that the layout needs."""
    count = math.prod(
        size for axis, size in vars(parallel).items() if axis in ("pipe", "data", "fsdp", "context", "tensor")
    )
    mesh = build_mesh(resolve_mesh(parallel, count), jax.devices()[:count])
    config = replace(config, parallel=parallel)
    rules = Rules(mesh, parallel.sequence_parallel)
    schedule = Schedule.from_config(config.optim, 10_000, BATCH)
    init, _, _ = build_init(config, rules)
    step = build_train_step(config, rules, schedule, "xla")
    feed = Feed(rules, config.train.micro_batch_size, batch_shardings(rules, config.data))
    return init(jax.random.key(config.train.seed)), step, feed, rules


def train_layout(config: Config, parallel: ParallelConfig, steps: int = 5) -> Outcome:
    """Train `steps` steps on a layout."""
    state, step, feed, _ = compile_layout(config, parallel)
    outcome = Outcome(gathered(state))
    for number in range(steps):
        ids = number * BATCH + np.arange(BATCH)
        batch = make_batch(random_samples(number), ids, config.data, eod=0)
        state, metrics = step(state, feed.place(batch, BATCH))
        outcome.losses.append(float(metrics["lm loss"]))
        outcome.norms.append(float(metrics["grad-norm"]))
        if number == 0:
            outcome.first = gathered(state)
    outcome.final = gathered(state)
    return outcome


def worst(a: dict[str, np.ndarray], b: dict[str, np.ndarray]) -> tuple[float, str]:
    """Largest difference of any tensor, relative to that tensor's largest entry, and its name."""
    return max((float(np.abs(a[n] - b[n]).max() / max(np.abs(b[n]).max(), 1e-30)), n) for n in b)
