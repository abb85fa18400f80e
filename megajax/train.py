"""`python -m megajax.train CONFIG.yaml [key=value ...]`: train a model. Read this file first; it is the whole system.

Configuration -> mesh -> tokenizer and data -> shapes and shardings -> state, new or restored -> the loop: batch, step,
and now and then a log line, an evaluation, a checkpoint.
"""

from __future__ import annotations

import logging
import sys
from dataclasses import dataclass
from pathlib import Path

import jax

from megajax.checkpoint.store import Checkpoints
from megajax.config import Config, ConfigError, check_batch, check_training, resolve_mesh
from megajax.config.cli import entry_point, parse_command_line
from megajax.data.build import build_datasets
from megajax.data.loader import Loader
from megajax.observe.report import Reporter
from megajax.parallel.kernels import choose_attention
from megajax.parallel.mesh import build_mesh, simulate_devices
from megajax.parallel.rules import Rules
from megajax.training.announce import announce, throughput_of
from megajax.training.batch_size import BatchSizeRamp
from megajax.training.evaluate import Evaluator
from megajax.training.feed import Feed
from megajax.training.health import check_step
from megajax.training.run_directory import RunDirectory
from megajax.training.sample import print_sample
from megajax.training.schedule import Schedule
from megajax.training.setup import check_tokenizer, prepare
from megajax.training.step import batch_shardings, build_eval_step, build_init, build_train_step
from megajax.training.stop import StopRequest


@dataclass(frozen=True)
class Result:
    """What a run came to."""

    output_dir: Path
    step: int
    validation: dict[int, float]
    """Validation loss by step, of this start."""


@entry_point
def main(argv: list[str]) -> None:
    """The command line."""
    logging.basicConfig(level=logging.INFO, format="%(levelname)s: %(message)s")
    logging.getLogger("absl").setLevel(logging.WARNING)
    loaded, _ = parse_command_line("python -m megajax.train", "Train a model.", argv)
    train(loaded.config)


def train(config: Config) -> Result:
    """Train a model, or go on training it: a directory with checkpoints is resumed.

    Raises:
        ConfigError: something the user has to correct.
        FloatingPointError: the loss is no longer finite.
    """
    check_training(config)
    if config.parallel.simulate_devices:
        simulate_devices(config.parallel.simulate_devices)

    # Mesh: every later array is sharded over it, by the one rule table.
    mesh = build_mesh(resolve_mesh(config.parallel, jax.device_count()))
    check_batch(config, mesh.shape["data"])
    rules = Rules(mesh, config.parallel.sequence_parallel)

    # Data: which samples a step sees is a function of the samples consumed so far, and of nothing else.
    run = RunDirectory.claim(config)
    config, tokenizer = prepare(config, run)
    ramp = BatchSizeRamp.from_config(config.train)
    steps = config.train.steps or ramp.steps_for_samples(config.train.samples or 0)
    samples = config.train.samples or steps * config.train.global_batch_size
    datasets = build_datasets(
        config.data, {"train": samples, "valid": None, "test": None}, config.train.seed, tokenizer
    )
    if datasets["train"] is None:
        raise ConfigError(f"data.split {config.data.split} leaves no document to train on")

    # Shapes and shardings first, numbers later: nothing is ever held unsharded.
    kernel = choose_attention(
        config.train.attention, config.model, config.train.precision, config.data.reset_attention, jax.default_backend()
    )
    schedule = Schedule.from_config(config.optim, samples, config.train.global_batch_size)
    init, abstract_state, shardings = build_init(config, rules)
    train_step = build_train_step(config, rules, schedule, kernel.name)
    feed = Feed(rules, config.train.micro_batch_size, batch_shardings(rules, config.data))
    evaluate = Evaluator(
        build_eval_step(config, rules, kernel.name), feed, config.data, tokenizer.eod_id,
        config.train.global_batch_size, config.evaluation.steps,
    )  # fmt: skip

    # State: restored straight into its shards, or drawn in them.
    checkpoints = Checkpoints(run.checkpoints, config.checkpoint)
    if checkpoints.latest is not None:
        state, record = checkpoints.restore(abstract_state, shardings)
        check_tokenizer(tokenizer, record, run)
        step, consumed = record["step"], record["consumed_samples"]
    else:
        state, step, consumed = init(jax.random.key(config.train.seed)), 0, 0

    announce(config, mesh, kernel, datasets, steps, step, run)
    if step >= steps:
        print(f"{run.path} has finished its {steps} steps: nothing to do (raise train.steps to go on)")
        return Result(run.path, step, {})

    loader = Loader(datasets["train"], config.data, tokenizer.eod_id, ramp.batch_size_at, consumed, feed.rows)
    throughput = throughput_of(config, mesh)
    validation: dict[int, float] = {}

    def evaluate_on(split: str, name: str) -> None:
        dataset = datasets[split]
        if dataset is None or config.evaluation.steps == 0:
            return
        with reporter.paused():
            loss = evaluate(state.params, dataset)
        reporter.evaluation(step, consumed, loss, name)
        if split == "valid":
            validation[step] = loss

    def save() -> None:
        record = {"step": step, "consumed_samples": consumed, "tokenizer": tokenizer.identity}
        with reporter.paused():
            checkpoints.save(step, state, record)

    with StopRequest() as stop, Reporter(config.log, run.path, steps, step, throughput) as reporter:
        if step == 0 and config.evaluation.every:
            evaluate_on("valid", "validation")
        for consumed, host_batch in loader:
            batch_size = ramp.batch_size_at(consumed)
            state, metrics = train_step(state, feed.place(host_batch, batch_size))
            step, consumed = step + 1, consumed + batch_size
            check_step(reporter.step(step, consumed, batch_size, metrics), config, checkpoints.latest)

            last = step == steps or stop.requested
            if last or step % (config.evaluation.every or steps) == 0 or step % (config.checkpoint.every or steps) == 0:
                check_step(reporter.flush(), config, checkpoints.latest)
            if not stop.requested and (step == steps or step % (config.evaluation.every or steps) == 0):
                evaluate_on("valid", "validation")
            if last or step % (config.checkpoint.every or steps) == 0:
                save()
            if last:
                break
        if step == steps:
            evaluate_on("test", "test")
    checkpoints.close()

    if stop.requested:
        print(f"{stop.requested}: saved step {step} of {steps} in {run.checkpoints}; the same command resumes")
    else:
        print_sample(config, state.params, tokenizer)
        print(f"finished: {step} steps; checkpoints, metrics.jsonl and config.yaml are in {run.path}")
    return Result(run.path, step, validation)


if __name__ == "__main__":
    sys.exit(main())
