"""`python -m megajax.train CONFIG.yaml [key=value ...]`: train a model. Read this file first; it is the whole system.

Configuration -> mesh -> tokenizer and data -> shapes and shardings -> state, drawn or restored -> the loop: batch,
step, and now and then a log line, an evaluation, a checkpoint.
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
from megajax.observe.late import StepMetrics
from megajax.observe.report import Reporter
from megajax.parallel.kernels import choose_attention
from megajax.parallel.mesh import build_mesh, simulate_devices
from megajax.parallel.rules import Rules
from megajax.training.announce import announce, throughput_of
from megajax.training.batch_size import BatchSizeRamp
from megajax.training.canonical import CanonicalForm
from megajax.training.evaluate import Evaluator
from megajax.training.feed import Feed
from megajax.training.health import check_step
from megajax.training.run_directory import RunDirectory
from megajax.training.sample import encode_prompt, print_sample
from megajax.training.schedule import Schedule
from megajax.training.setup import check_order, check_tokenizer, prepare
from megajax.training.step import batch_shardings, build_eval_step, build_init, build_train_step
from megajax.training.stop import StopRequest


@entry_point
def main(argv: list[str]) -> None:
    """The command line."""
    logging.basicConfig(format="%(levelname)s: %(message)s", force=True)  # Orbax has set one up
    logging.getLogger("megajax").setLevel(logging.INFO)
    loaded, _ = parse_command_line("python -m megajax.train", "Train a model.", argv)
    train(loaded.config)


@dataclass(frozen=True)
class Result:
    """What a run came to."""

    output_dir: Path
    step: int
    validation: dict[int, float]
    """Validation losses of this start, by step."""


def train(config: Config) -> Result:
    """Train a model, or go on training it: a directory with checkpoints is resumed.

    Raises:
        ConfigError: something the user has to correct.
        FloatingPointError: the loss is no longer finite.
    """
    check_training(config)
    if config.parallel.simulate_devices:
        simulate_devices(config.parallel.simulate_devices)
    run = RunDirectory.claim(config)
    with Checkpoints(run.checkpoints, config.checkpoint) as checkpoints:
        return Trainer(config, run, checkpoints).train()


class Trainer:
    """One run: everything is built in `__init__`, in the order in which it depends on what came before."""

    def __init__(self, config: Config, run: RunDirectory, checkpoints: Checkpoints) -> None:
        """Build the run, or restore it where its newest checkpoint left off."""
        # Mesh: every array is sharded over it by the one rule table.
        mesh = build_mesh(resolve_mesh(config.parallel, jax.device_count()))
        check_batch(config, mesh.shape["data"])
        rules = Rules(mesh, config.parallel.sequence_parallel, config.parallel.zero)

        # Data: which samples a step sees is a function of the samples consumed before it, and of nothing else.
        config, self.tokenizer = prepare(config, run)
        self.config, self.run, self.checkpoints = config, run, checkpoints
        self.ramp = BatchSizeRamp.from_config(config.train)
        self.steps = config.train.steps or self.ramp.steps_for_samples(config.train.samples or 0)
        samples = config.train.samples or self.steps * config.train.global_batch_size
        if self.steps == 0:
            raise ConfigError(f"train.samples {samples} is less than one global batch: raise it")
        encode_prompt(config, self.tokenizer)
        held_out = None if config.evaluation.steps else 0  # one epoch, or nothing
        sizes = {"train": samples, "valid": held_out, "test": held_out}
        self.datasets = build_datasets(config.data, sizes, config.train.seed, self.tokenizer)
        dataset = self.datasets["train"]
        if dataset is None:
            raise ConfigError(f"data.split {config.data.split} leaves no document to train on")

        # Step: shapes and shardings first, numbers later, so that nothing is ever held unsharded.
        kernel = choose_attention(config, jax.default_backend())
        schedule = Schedule.from_config(config.optim, samples, config.train.global_batch_size)
        init, abstract_state, shardings = build_init(config, rules)
        self.train_step = build_train_step(config, rules, schedule, kernel.name)
        self.feed = Feed(rules, config.train.micro_batch_size, batch_shardings(rules, config.data))
        self.evaluator = Evaluator(build_eval_step(config, rules, kernel.name), self.feed, config, self.tokenizer)

        # State: restored straight into its shards, or drawn in them.
        self.canonical = CanonicalForm(abstract_state, shardings, rules, config.parallel.chunks)
        if checkpoints.latest is None:
            self.state, self.step, self.consumed = init(jax.random.key(config.train.seed)), 0, 0
        else:
            restored, record = checkpoints.restore(self.canonical.abstract, self.canonical.shardings)
            self.state = self.canonical.back(restored)
            check_tokenizer(self.tokenizer, record, run)
            check_order(dataset.fingerprint, self.steps, record, run)
            self.step, self.consumed = record["step"], record["consumed_samples"]
        left, size_at = max(self.steps - self.step, 0), self.ramp.batch_size_at
        self.batches = Loader(dataset, config.data, self.tokenizer.eod_id, size_at, left, self.consumed, self.feed.rows)
        self.validation: dict[int, float] = {}
        self.reporter = Reporter(config.log, run.path, self.steps, self.step, throughput_of(config, mesh))
        announce(config, mesh, kernel, self.datasets, self.steps, self.step, run)

    def train(self) -> Result:
        """Go from the current step to the last one, or to a request to stop."""
        if self.step >= self.steps:
            print(f"{self.run.path} has finished its {self.steps} steps: nothing to do (raise train.steps to go on)")
            return Result(self.run.path, self.step, {})
        with StopRequest() as stop, self.reporter:
            if self.step == 0 and self.config.evaluation.every:
                self.evaluate("valid", "validation")
            for consumed, host_batch in self.batches:
                batch_size = self.ramp.batch_size_at(consumed)
                batch = self.feed.place(host_batch, batch_size)
                self.state, metrics = self.train_step(self.state, batch)
                self.step, self.consumed = self.step + 1, consumed + batch_size
                self._check(self.reporter.step(self.step, self.consumed, batch_size, metrics))
                if self._due(self.config.evaluation.every):
                    self.evaluate("valid", "validation")
                if stop.requested or self._due(self.config.checkpoint.every):
                    self.save()
                if stop.requested:
                    break
            if self.step == self.steps:
                self.evaluate("test", "test")
            self.checkpoints.wait()  # in here, where a second signal cannot end the process before it is done
        if self.step < self.steps:
            print(f"{stop.requested}: step {self.step} of {self.steps} is saved; the same command resumes")
        else:
            print_sample(self.config, self.state.params, self.tokenizer)
            print(f"finished {self.steps} steps: config, checkpoints and metrics are in {self.run.path}")
        return Result(self.run.path, self.step, self.validation)

    def evaluate(self, split: str, name: str) -> None:
        """Report the loss on a split, if there is one."""
        dataset = self.datasets[split]
        if dataset is None or self.config.evaluation.steps == 0:
            return
        self._check(self.reporter.flush())
        with self.reporter.paused():
            loss = self.evaluator(self.state.params, dataset)
        self.reporter.evaluation(self.step, self.consumed, loss, name)
        if split == "valid":
            self.validation[self.step] = loss

    def save(self) -> None:
        """Write a checkpoint of this step, in the background if so configured."""
        self._check(self.reporter.flush())
        record = {
            "step": self.step,
            "consumed_samples": self.consumed,
            "steps": self.steps,
            "tokenizer": self.tokenizer.identity,
            "order": self.batches.dataset.fingerprint,
        }
        with self.reporter.paused():
            self.checkpoints.save(self.step, self.canonical.of(self.state), record)

    def _due(self, every: int | None) -> bool:
        return self.step == self.steps or (every is not None and self.step % every == 0)

    def _check(self, done: StepMetrics | None) -> None:
        check_step(done, self.config, self.checkpoints.latest)


if __name__ == "__main__":
    sys.exit(main())
