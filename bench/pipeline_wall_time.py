"""`python -m bench.pipeline_wall_time`: the cost of a pipeline in real time, on four simulated devices.

The same model and global batch run as four stages, plain and interleaved, and as four replicas without stages; all must
have the same losses. They take turns, so that changes in the machine's load affect all. On real devices the bubble is
time in which a device has nothing to do. Here the devices share the machine's cores, so the masked slots that fill the
bubble take time from the others, and times should be in the ratio of the work: (v M + P - 1) / (v M) for layers.

Letters: P stages, v chunks per stage, M microbatches.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

import jax
import numpy as np

from megajax.config import Config, DataConfig, ModelConfig, OptimConfig, ParallelConfig, TrainConfig
from megajax.costs.device import Device
from megajax.parallel.mesh import simulate_devices
from megajax.parallel.pipeline.schedule import Interleaved1F1B
from megajax.planning.equivalence import compile_layout, random_batch

CONFIG = Config(
    model=ModelConfig(num_layers=8, hidden_size=256, num_heads=4, max_positions=128, vocab_size=1024),
    data=DataConfig(seq_length=128),
    train=TrainConfig(steps=1, global_batch_size=16),
    optim=OptimConfig(decay_style="constant"),
)
LAYOUTS = {
    "pipe 1, data 4": ParallelConfig(data=4),
    "pipe 4": ParallelConfig(pipe=4, data=1),
    "pipe 4, 2 chunks": ParallelConfig(pipe=4, chunks=2, data=1),
}
Step = Callable[[], float]


def main(argv: Sequence[str] | None = None) -> int:
    """Print a table; 1 if the losses differ."""
    parser = argparse.ArgumentParser(prog="python -m bench.pipeline_wall_time")
    parser.add_argument("--rounds", type=int, default=10, help="timed steps of each")
    rounds = parser.parse_args(argv).rounds
    simulate_devices(4)
    return report(*compare([step_of(replace(CONFIG, parallel=parallel)) for parallel in LAYOUTS.values()], rounds))


def step_of(config: Config) -> Step:
    """A call that takes a step on its own state, on the same batch, and returns the loss."""
    state, step, feed, _ = compile_layout(config)
    batch = feed.place(random_batch(config, 0), config.train.global_batch_size)

    def run() -> float:
        nonlocal state
        state, metrics = step(state, batch)
        jax.block_until_ready(state)
        return float(metrics["lm loss"])

    return run


def compare(steps: Sequence[Step], rounds: int) -> tuple[np.ndarray, np.ndarray]:
    """Seconds [rounds, layouts] and losses [rounds + 1, layouts]; the first step compiles and is not timed."""
    seconds, losses = [], [[step() for step in steps]]
    for _ in range(rounds):
        lap, row = [time.perf_counter()], []
        for step in steps:
            row.append(step())
            lap.append(time.perf_counter())
        seconds.append(np.diff(lap))
        losses.append(row)
    return np.array(seconds), np.array(losses)


def report(seconds: np.ndarray, losses: np.ndarray) -> int:
    """Print times beside the work that the schedules give them; 1 if the losses differ."""
    print(f"{'':<18}{'M':>4}{'median ms':>11}{'least ms':>10}{'ratio':>7}{'work':>7}{'last loss':>11}")
    least = seconds.min(axis=0) * 1e3
    for (name, parallel), laps, fastest, loss in zip(LAYOUTS.items(), seconds.T * 1e3, least, losses.T, strict=True):
        M = Device.of(replace(CONFIG, parallel=parallel)).microbatches
        work = 1 + Interleaved1F1B(parallel.pipe, parallel.chunks, M).bubble_fraction
        print(f"{name:<18}{M:>4}{statistics.median(laps):>11.1f}{fastest:>10.1f}", end="")
        print(f"{fastest / least[0]:>7.2f}{work:>7.2f}{loss[-1]:>11.5f}")
    print("ratio: of the least times. work: slots run per slot that counts; the bubble's masked ones take time here")
    worst = np.abs(losses / losses[:, :1] - 1).max()
    print(f"losses of {len(losses)} steps from the same weights differ by at most {worst:.1e}")
    return int(not worst < 1e-4)


if __name__ == "__main__":
    sys.exit(main())
