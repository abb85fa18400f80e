"""`python -m tests.gpu.smoke`: does it train on this GPU, how fast, and to the same loss as on a CPU?

Takes less than five minutes. Run it from the repository's root; nothing is installed. Two tiny models train here and,
in a second process, on the CPU: in fp32, and in bf16, on a GPU with cuDNN's attention. GPT-3 1.3B trains 20 steps, and
a short quickstart goes through `megajax.train`. The models need jax, flax, optax, numpy, pydantic and PyYAML; the
quickstart needs all of megajax's dependencies and is skipped where one is missing. `--tiny` is for a CPU.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np

try:
    from megajax.config import Config, load_config, resolve_mesh
    from megajax.config.presets import CONFIGS
    from megajax.data.gpt import make_batch
    from megajax.models.families import batch_arrays
    from megajax.parallel.kernels import choose_attention
    from megajax.parallel.mesh import build_mesh
    from megajax.parallel.rules import Rules
    from megajax.training.batches import Feed, batch_shardings
    from megajax.training.schedule import Schedule
    from megajax.training.setup import throughput_of
    from megajax.training.step import build_init, build_train_step
except ModuleNotFoundError as error:
    sys.exit(f"smoke: {error.name} is not installed: nothing can run without it")

TINY = (
    "model.num_layers=2", "model.hidden_size=128", "model.num_heads=2", "model.max_positions=128",
    "model.vocab_size=256", "data.seq_length=64", "train.global_batch_size=8", "train.micro_batch_size=4",
    "optim.lr=3e-3",
)  # fmt: skip
TOLERANCES = {"fp32": 1e-2, "bf16": 5e-2}
"""Largest difference of a loss from the CPU's: a GPU multiplies fp32 matrices in TF32, 10 bits as bf16 has 7."""


class Row(NamedTuple):
    """One line of the table."""

    name: str
    attention: str
    tokens_per_second: float
    mfu: float | None
    losses: list[float]
    peak_bytes: int | None
    """Of the process so far, which is why the largest model comes last."""


def main(argv: Sequence[str] | None = None) -> int:
    """Print the table; 0 if every check holds, else 1."""
    parser = argparse.ArgumentParser(prog="python -m tests.gpu.smoke", description=__doc__)
    parser.add_argument("--tiny", action="store_true", help="everything small: for a CPU")
    parser.add_argument("--losses", action="store_true", help="print the losses of the tiny models as JSON, and stop")
    options = parser.parse_args(argv)
    steps = 3 if options.tiny else 20
    tiny = {precision: tiny_config(precision, steps) for precision in TOLERANCES}
    if options.losses:
        print(json.dumps({precision: train_random(precision, config).losses for precision, config in tiny.items()}))
        return 0

    reference = _start_on_cpu(options.tiny)
    rows = [train_random(f"tiny {precision}", config) for precision, config in tiny.items()]
    rows += quickstart(options.tiny)
    rows.append(train_random("GPT-3 1.3B bf16", large_config(steps, options.tiny)))
    expected = json.loads(reference.communicate()[0])

    print_table(rows)
    problems = [problem for row in rows for problem in check_losses(row)]
    for row, (precision, losses) in zip(rows[: len(expected)], expected.items(), strict=True):
        worst = float(np.abs(np.subtract(row.losses, losses)).max())
        print(f"{row.name}: losses differ from the CPU's by at most {worst:.1e} (allowed: {TOLERANCES[precision]})")
        problems += [f"{row.name}: losses are not the CPU's"] if not worst <= TOLERANCES[precision] else []
    print("\n".join(problems) or "all checks hold")
    return 1 if problems else 0


def tiny_config(precision: str, steps: int) -> Config:
    """A model that a CPU trains in seconds; heads of 64, which cuDNN takes."""
    return load_config(None, [*TINY, f"train.precision={precision}", f"train.steps={steps}"]).config


def large_config(steps: int, tiny: bool) -> Config:
    """GPT-3 1.3B in bf16, 32k tokens a step, with cuDNN's attention or not at all."""
    shape = TINY if tiny else ("train.global_batch_size=16", "train.micro_batch_size=4", "train.attention=cudnn")
    return load_config("models/gpt3_1.3b.yaml", [*shape, "train.precision=bf16", f"train.steps={steps}"]).config


def train_random(name: str, config: Config) -> Row:
    """Train `train.steps` steps on the first device, on sequences that count upwards from random numbers."""
    mesh = build_mesh(resolve_mesh(config.parallel, 1), jax.devices()[:1])
    rules = Rules(mesh, config.parallel.sequence_parallel)
    kernel = choose_attention(config, jax.default_backend(), batch_arrays(config.model, config.data))
    size, steps = config.train.global_batch_size, config.train.steps
    schedule = Schedule.from_config(config.optim, size * steps, size)
    init, _, _ = build_init(config, rules)
    step = build_train_step(config, rules, schedule, kernel.name)
    feed = Feed(rules, config.train.micro_batch_size, batch_shardings(rules, config.model, config.data))
    state = init(jax.random.key(0))
    losses, seconds = [], []
    for number in range(steps):
        batch = feed.place(_counting_batch(config, number), size)
        start = time.perf_counter()
        state, metrics = step(state, batch)
        losses.append(float(metrics["lm loss"]))
        seconds.append(time.perf_counter() - start)
    speed = throughput_of(config, mesh).speed(size, statistics.median(seconds[1:]))  # the first one compiles
    memory = jax.devices()[0].memory_stats() or {}
    return Row(name, kernel.name, speed.tokens_per_second, speed.mfu, losses, memory.get("peak_bytes_in_use"))


def _counting_batch(config: Config, number: int) -> dict[str, np.ndarray]:
    size, vocab = config.train.global_batch_size, config.model.vocab_size
    starts = np.random.default_rng(number).integers(0, vocab, (size, 1))
    samples = (starts + np.arange(config.data.seq_length + 1)) % vocab
    return make_batch(list(samples.astype(np.int32)), number * size + np.arange(size), config.data, eod=0)


def quickstart(tiny: bool) -> list[Row]:
    """The quickstart, shortened, through `megajax.train` with all that belongs to it; nothing if it cannot start."""
    try:
        from megajax.train import train
    except ModuleNotFoundError as error:
        print(f"quickstart: skipped, {error.name} is not installed")
        return []
    with tempfile.TemporaryDirectory() as directory:
        words = [f"output_dir={directory}/run", f"data.text=[{CONFIGS}/data/shakespeare.jsonl]", "train.steps=100"]
        small = ["tokenizer.vocab_size=400", "model.hidden_size=32", "train.steps=3", "evaluation.steps=0"]
        shape = ["train.micro_batch_size=2", "evaluation.every=null", "checkpoint.every=null"]
        result = train(load_config("quickstart.yaml", [*words, *shape, *(small if tiny else [])]).config)
        lines = (result.output_dir / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    records = [record for line in lines if "lm loss" in (record := json.loads(line))]
    timing = [record["timing"] for record in records[1:]]
    speed = statistics.median(step["tokens-per-second"] for step in timing)
    mfu = statistics.median(step["mfu"] for step in timing) if "mfu" in timing[0] else None
    return [Row("quickstart fp32", "xla", speed, mfu, [record["lm loss"] for record in records], None)]


def _start_on_cpu(tiny: bool) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "tests.gpu.smoke", "--losses", *(["--tiny"] if tiny else [])]
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "CUDA_VISIBLE_DEVICES": ""}
    root = Path(__file__).parents[2]
    return subprocess.Popen(command, cwd=root, env=environment, stdout=subprocess.PIPE, text=True)


def print_table(rows: list[Row]) -> None:
    """One line per model."""
    device = jax.devices()[0]
    print(f"\n{device.device_kind} ({device.platform}), jax {jax.__version__}")
    print(f"{'':<18}{'attention':>10}{'tokens/s':>12}{'MFU %':>8}{'peak GiB':>10}{'first loss':>12}{'last loss':>11}")
    for row in rows:
        mfu = "-" if row.mfu is None else f"{100 * row.mfu:.1f}"
        memory = "-" if row.peak_bytes is None else f"{row.peak_bytes / 2**30:.1f}"
        print(
            f"{row.name:<18}{row.attention:>10}{row.tokens_per_second:>12,.0f}{mfu:>8}{memory:>10}"
            f"{row.losses[0]:>12.4f}{row.losses[-1]:>11.4f}"
        )


def check_losses(row: Row) -> list[str]:
    """What is wrong with a run that is compared with nothing."""
    if not np.isfinite(row.losses).all():
        return [f"{row.name}: a loss is not finite"]
    return [] if row.losses[-1] < row.losses[0] else [f"{row.name}: the loss does not fall"]


if __name__ == "__main__":
    sys.exit(main())
