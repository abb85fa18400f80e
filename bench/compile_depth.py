"""`python -m bench.compile_depth`: a deep model must not take longer to compile than a shallow one.

The training step of the same width is compiled (traced, lowered, compiled) with 12 and with 96 layers in turns, and the
ratio of the shortest times is printed; it should be at most 1.3. Both are the real step: a shallow model with further
layers of zeros, which add nothing to the residual stream, must have the same loss as without them.
"""

from __future__ import annotations

import sys
import time
from dataclasses import replace
from typing import Any

import jax
import numpy as np

from megajax.config import Config, DataConfig, ModelConfig, TrainConfig
from megajax.config.parallel import AXES
from megajax.data.gpt import make_batch
from megajax.models.parameters import annotate
from megajax.parallel.mesh import build_mesh
from megajax.parallel.rules import Rules
from megajax.training.batches import Feed, batch_shardings
from megajax.training.schedule import Schedule
from megajax.training.step import build_init, build_train_step
from tests.harness import gathered, random_samples

SHALLOW, DEEP = 12, 96
AIM = 1.3
ROUNDS = 3
CONFIG = Config(
    model=ModelConfig(hidden_size=64, num_heads=4, max_positions=32, vocab_size=256),
    data=DataConfig(seq_length=32),
    train=TrainConfig(steps=1, global_batch_size=2, micro_batch_size=2),
)


def main() -> int:
    """Print a table; 1 if the ratio is above the aim or the losses differ."""
    seconds: dict[int, list[float]] = {SHALLOW: [], DEEP: []}
    steps: dict[int, Any] = {}
    for _ in range(ROUNDS):
        for layers, times in seconds.items():
            steps[layers], elapsed = compile_step(layers)
            times.append(elapsed)
    for layers, times in seconds.items():
        print(f"{layers:>3} layers: compiled in {min(times):.2f} s (of {', '.join(f'{t:.2f}' for t in times)})")
    ratio = min(seconds[DEEP]) / min(seconds[SHALLOW])
    losses = losses_of(steps)
    print(f"ratio {ratio:.2f} (aim: {AIM} at most); losses {losses[0]:.6f} and {losses[1]:.6f}")
    return int(ratio > AIM or not np.isclose(*losses, rtol=1e-5))


def compile_step(layers: int) -> tuple[Any, float]:
    """The executable training step of a model with that many layers, and the seconds it took to make."""
    config, rules = _config(layers), _rules()
    _, state, shardings = build_init(config, rules)
    state = jax.tree.map(lambda leaf, at: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=at), state, shardings)
    step = build_train_step(config, rules, Schedule.from_config(config.optim, 2, 2), "xla")
    batch = _batch(rules)
    start = time.perf_counter()
    compiled = step.lower(state, batch).compile()
    return compiled, time.perf_counter() - start


def losses_of(steps: dict[int, Any]) -> tuple[float, float]:
    """Loss of the shallow model in its own step and, under layers of zeros, in the deep one's."""
    init, _, _ = build_init(_config(SHALLOW), _rules())
    state = init(jax.random.key(0))
    arrays = gathered(state)
    _, like, shardings = build_init(_config(DEEP), _rules())

    def on_top(name: str, deep: jax.ShapeDtypeStruct) -> np.ndarray:
        padded = np.zeros(deep.shape, deep.dtype)
        padded[tuple(map(slice, arrays[name].shape))] = arrays[name]
        return padded

    padded = annotate(like, on_top)
    states = {SHALLOW: state, DEEP: jax.device_put(padded, shardings)}
    shallow, deep = (float(steps[n](states[n], _batch(_rules()))[1]["lm loss"]) for n in (SHALLOW, DEEP))
    return shallow, deep


def _config(layers: int) -> Config:
    return replace(CONFIG, model=replace(CONFIG.model, num_layers=layers))


def _rules() -> Rules:
    return Rules(build_mesh(dict.fromkeys(AXES, 1), jax.devices()[:1]))


def _batch(rules: Rules) -> dict[str, jax.Array]:
    samples = random_samples(0, 2, CONFIG.data.seq_length, CONFIG.model.vocab_size)
    batch = make_batch(samples, np.arange(2), CONFIG.data, eod=0)
    return Feed(rules, 2, batch_shardings(rules, CONFIG.model, CONFIG.data)).place(batch, 2)


if __name__ == "__main__":
    sys.exit(main())
