"""`python -m megajax.train CONFIG.yaml [key=value ...]`: train a model. Read this file first; it is the whole system.

Configuration -> processes -> mesh -> tokenizer and data -> shapes and shardings -> state, drawn or restored -> the
loop: batch, step, and now and then a log line, an evaluation, a checkpoint.
"""

from __future__ import annotations

import hashlib
import logging
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import numpy as np

from megajax.checkpoint.store import Checkpoints
from megajax.cluster import Cluster, Watchdog, check_devices, detect, devices_by_host, join, tensor_warning
from megajax.config import ClusterConfig, Config, check_batch, check_training, dump_config, resolve_mesh
from megajax.config.cli import entry_point, parse_command_line
from megajax.corpus.prepare import prepare_text
from megajax.costs.gpu_settings import settings_warning
from megajax.data.dataset import Batch as HostBatch
from megajax.data.loader import Loader
from megajax.inference.sample import encode_prompt, print_sample
from megajax.interop.init_from import prepare_start, start_from, start_of
from megajax.models.families import batch_arrays
from megajax.observe.goodput import Clock
from megajax.observe.memory import explained_out_of_memory
from megajax.observe.profile import ProfileWindow
from megajax.observe.report import Reporter, StepMetrics
from megajax.parallel.kernels import choose_attention
from megajax.parallel.mesh import build_mesh, deterministic_kernels, simulate_devices
from megajax.parallel.rules import Rules
from megajax.processes import in_turn
from megajax.training.batch_size import BatchSizeRamp
from megajax.training.batches import Feed, batch_shardings
from megajax.training.evaluate import Evaluator, build_eval_step
from megajax.training.health import Returns, RollBack, check_step, give_up
from megajax.training.run_directory import RunDirectory
from megajax.training.schedule import Schedule, stretches_of
from megajax.training.setup import (
    announce,
    announce_data,
    changes,
    check_tokenizer,
    datasets_of,
    fit_to_tokenizer,
    stretches_before,
    throughput_of,
    training_data,
)
from megajax.training.signals import Pulse, Request, Requests
from megajax.training.state import CanonicalForm
from megajax.training.step import CompiledStep, build_init, build_train_step

log = logging.getLogger(__name__)


@entry_point
def main(argv: list[str]) -> None:
    """Run the command line and return its exit code."""
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # there is nothing to save before the loop
    logging.basicConfig(format="%(levelname)s: %(message)s", force=True)  # Orbax has set one up
    logging.getLogger("megajax").setLevel(logging.INFO)
    loaded, _ = parse_command_line("python -m megajax.train", "Train a model.", argv, start_of)
    train(loaded.config)


@dataclass(frozen=True)
class Result:
    """The outcome of a run."""

    output_dir: Path
    step: int
    validation: dict[int, float]
    """The validation losses since this start, by step."""


def train(config: Config) -> Result:
    """Train a model, or go on training it: a directory with checkpoints is resumed.

    Every process of a run calls this with the same configuration (but for `cluster.process`).

    Raises:
        InputError: something the user has to correct.
        FloatingPointError: a bad step, where `health.policy` ends the run.
    """
    clock = Clock()
    check_training(config)
    cluster = join_cluster(config)
    with cluster.guard(), Requests(config.train.exit_duration) as requests:
        run = RunDirectory(Path(config.output_dir))
        with run.locked(cluster.first):
            with cluster.first_alone("claim"):
                if cluster.first:
                    run.claim(config)
            with (
                Checkpoints(run.checkpoints(config.checkpoint), config.checkpoint, run.owner) as checkpoints,
                cluster.guard(),  # again: what fails in here is told before checkpoints close, which takes all
                explained_out_of_memory(),
            ):
                return Trainer(config, run, checkpoints, cluster, clock).train(requests)


def join_cluster(config: Config) -> Cluster:
    """Set JAX up as the configuration asks and join the other processes, which have to have the same one."""
    if config.parallel.simulate_devices:
        simulate_devices(config.parallel.simulate_devices)
    if config.train.deterministic:
        deterministic_kernels()
    identity = hashlib.sha256(dump_config(replace(config, cluster=ClusterConfig())).encode()).hexdigest()[:12]
    cluster = join(detect(os.environ, config.cluster), config.cluster, {"config": identity})
    if cluster.first:
        print(f" {cluster.launch.describe()}")
        if config.train.exit_duration and "JOB_COMPLETION_INDEX" in os.environ:
            log.warning(
                "train.exit_duration: Kubernetes takes that end for the end of the run, and starts no other pod"
            )
    else:
        logging.getLogger("megajax").setLevel(logging.ERROR)  # what concerns all is said once
    return cluster


class Trainer:
    """One run: everything is built in `__init__`, in the order in which it depends on what came before."""

    def __init__(
        self,
        config: Config,
        run: RunDirectory,
        checkpoints: Checkpoints,
        cluster: Cluster,
        clock: Clock,
        step: int | None = None,
    ) -> None:
        """Build the run, or restore it from the checkpoint of a step, the newest good one unless said otherwise."""
        self.run, self.checkpoints, self.cluster, self.clock = run, checkpoints, cluster, clock
        self.watchdog = Watchdog(config.cluster.hang_seconds, str(run.path), cluster)

        # Mesh: every array is sharded over it by the one rule table.
        check_devices(cluster, config.cluster.start_seconds)
        sizes = resolve_mesh(config.parallel, jax.device_count())
        mesh = build_mesh(sizes, devices_by_host(jax.devices(), cluster.hosts))
        check_batch(config.train, config.parallel, mesh.shape["data"])
        scattered = tensor_warning(mesh.shape["tensor"], jax.devices(), cluster.hosts)
        for warning in filter(None, (scattered, settings_warning(jax.devices()[0].device_kind))):
            log.warning(warning)
        self.rules = Rules.of(mesh, config.parallel, config.model)

        # Files of the run's own: weights to start from, tokenizer, token files; and the vocabulary size they imply.
        trained = checkpoints.latest is not None
        with cluster.first_alone("data"):
            prepare_start(config, run, trained)
            kind = config.data.kind_for(config.model.family)
            data, tokenizer = prepare_text(config.data, config.tokenizer, run.path, kind, trained)
            config, self.tokenizer = fit_to_tokenizer(replace(config, data=data, tokenizer=tokenizer))
        self.config = config
        encode_prompt(config.log, config.model, self.tokenizer)

        # State: shapes and shardings first, so that nothing is ever held unsharded; then restored, or drawn, in shards.
        kernel = choose_attention(config, jax.default_backend(), batch_arrays(config.model, config.data))
        record = self._build_state(trained, step)

        # Data: which samples a step sees is a function of the samples consumed before it, and of nothing else.
        self.ramp = BatchSizeRamp.from_config(config.train)
        self.steps, self.samples = self.ramp.length(config.train, self.step, self.consumed)
        self.datasets = datasets_of(config, self.tokenizer, self.samples, self.consumed, record)
        self.dataset = training_data(config.data, self.datasets)
        self.unevaluated = self._due(config.evaluation.every) and not (record and record["evaluated"])

        # Step: compiled when the first batch is there.
        self._build_steps(kernel.name, record)

        self.validation: dict[int, float] = {}
        self.returns = Returns(run.returns_file, trained, cluster.first)
        self.pulse, self.request = Pulse(), Request.NOTHING
        self.seconds = np.zeros((cluster.processes, 2))
        self.reporter = Reporter(config.log, run.path, self.steps, self.step, throughput_of(config, mesh), clock)
        announce(config, mesh, kernel, self.datasets, self.steps, self.step, run)
        changed = changes(record, config.train, config.optim, self.samples, self.schedule) if record else []
        announce_data(self.dataset, self.consumed, changed)

    def _build_state(self, trained: bool, step: int | None) -> dict[str, Any] | None:
        """Draw the state, or restore it from the checkpoint of a step and return the record beside it."""
        init, abstract_state, shardings = build_init(self.config, self.rules)
        self.canonical = CanonicalForm(abstract_state, shardings, self.rules, self.config.parallel.chunks)
        self.checkpoints.check_room(self.canonical.abstract, saved=trained)
        with self.watchdog, self.watchdog.patient():
            if trained:
                record = self.restore(step)
                self.step, self.consumed = record["step"], record["consumed_samples"]
                return record
            self.state, self.step, self.consumed = in_turn(init(jax.random.key(self.config.train.seed))), 0, 0
            if self.config.init_from:
                self.state = start_from(self.config, self.run, self.state, self.canonical, self.tokenizer)
        return None

    def _build_steps(self, kernel: str, record: dict[str, Any] | None) -> None:
        """Build the steps of training and evaluation, and their feed."""
        config, rules = self.config, self.rules
        stretches = stretches_of(config.train, stretches_before(record), int(self.state.samples))
        self.schedule = Schedule.of_run(config.optim, config.train, self.steps, self.samples, stretches)
        self.train_step = CompiledStep(build_train_step(config, rules, self.schedule, kernel), self._compiling)
        self.feed = Feed(rules, config.train.micro_batch_size, batch_shardings(rules, config.model, config.data))
        eval_step, size = build_eval_step(config, rules, kernel), config.train.global_batch_size
        self.evaluator = Evaluator(eval_step, self.feed, size, config.evaluation.steps)

    def train(self, requests: Requests) -> Result:
        """Go from the current step to the last one, or to a request to stop."""
        self.requests = requests
        if self.step >= self.steps:
            self.say(f"{self.run.path} has finished its {self.steps} steps: nothing to do (raise train.steps to go on)")
            return Result(self.run.path, self.step, {})
        with self.reporter, self.watchdog, ProfileWindow(self.config.profile, self.run.path / "profile") as profile:
            if self.unevaluated:  # the first step is yet to come, or a request to stop came in between
                self.evaluate("valid", "validation")
            while self.step < self.steps and not self.request.stops:
                try:
                    self._advance(profile)
                except RollBack as bad:
                    self._roll_back(bad)
            if self.step == self.steps:
                self.evaluate("valid", "validation")
                self.evaluate("test", "test")
            self.save()
            self._wait_for_saves()  # in here, where a second signal cannot end the process before it is done
        if self.step < self.steps:
            self.say(f"{self.request}: step {self.step} of {self.steps} is saved; the same command resumes")
        else:
            self.checkpoints.finish()
            print_sample(self.config, self.state.params, self.tokenizer)
            self.say(f"finished {self.steps} steps: config, checkpoints and metrics are in {self.run.path}")
        return Result(self.run.path, self.step, self.validation)

    def _advance(self, profile: ProfileWindow) -> None:
        """Take steps until the last one, or until something asks to stop.

        Raises:
            RollBack: a step was bad, and is not to count.
        """
        for consumed, host_batch in self.batches():
            with profile.step(self.step + 1, self.state):
                metrics = self.take_step(consumed, host_batch)
            self._listen()
            self._check(self.reporter.step(self.step, self.consumed, self.consumed - consumed, metrics))
            self.watchdog.beat(f"step {self.step}")
            if self._due(self.config.evaluation.every):
                self.evaluate("valid", "validation")
            if self.request.stops:
                break
            if self.request or self._due(self.config.checkpoint.every):
                self.save()
                self.request = Request.NOTHING
            elif self._due(self.config.checkpoint.local_every):
                self.save_local()
        self._check(self.reporter.flush())

    def take_step(self, consumed: int, host_batch: HostBatch) -> dict[str, jax.Array]:
        """Take one training step. Its metrics stay on the device, which may still be computing them."""
        batch_size = self.ramp.batch_size_at(consumed)
        self.state, metrics = self.train_step(self.state, self.feed.place(host_batch, batch_size))
        self.step, self.consumed = self.step + 1, consumed + batch_size
        return metrics

    def batches(self) -> Iterator[tuple[int, HostBatch]]:
        """Yield (samples consumed before, batch) up to the last step, and book the time spent waiting for each."""
        left, size_at = self.steps - self.step, self.ramp.batch_size_at
        loader = Loader(self.dataset, self.config.data.prefetch, size_at, left, self.consumed, self.feed.rows)
        batches = iter(loader)
        for _ in range(left):
            with self.reporter.during("input"):
                item = next(batches)
            yield item

    def evaluate(self, split: str, name: str) -> None:
        """Compute and report the losses on a split, if the data has one."""
        dataset = self.datasets[split]
        if dataset is None or self.config.evaluation.steps == 0:
            return
        self._check(self.reporter.flush())
        with self.reporter.during("evaluation"), self.watchdog.patient():
            losses = self.evaluator(self.state.params, dataset, self._interrupted)
        if losses is None:
            return
        if "lm loss" not in losses:
            log.warning("%s at step %d: no token of these samples counts, so there is no loss", name, self.step)
            return
        self.reporter.evaluation(self.step, self.consumed, losses, name)
        if split == "valid":
            self.validation[self.step] = losses["lm loss"]

    def save(self) -> None:
        """Write a checkpoint of this step, in the background if so configured."""
        self._check(self.reporter.flush())
        with self.reporter.during("checkpoint"), self.watchdog.patient():
            state, loss = self.canonical.of(self.state), self.validation.get(self.step)
            seconds = self.checkpoints.save(self.step, state, self.record(), loss)
        self.reporter.saved(self.step, seconds, self.config.checkpoint.asynchronous)

    def save_local(self) -> None:
        """Write this host's own copy of the state after this step."""
        self._check(self.reporter.flush())
        with self.reporter.during("checkpoint"), self.watchdog.patient():
            self.checkpoints.save_local(self.step, self.canonical.of(self.state), self.record())

    def restore(self, step: int | None = None) -> dict[str, Any]:
        """Restore the state from a checkpoint (None: the newest good one) and return the record beside it."""
        with self.clock.during("restore"):
            restored, record = self.checkpoints.restore(self.canonical.abstract, self.canonical.shardings, step)
            self.state = self.canonical.back(restored)
        check_tokenizer(self.tokenizer, record, self.run)
        return record

    def record(self) -> dict[str, Any]:
        """Return the record that is saved beside the state."""
        return {
            "step": self.step,
            "consumed_samples": self.consumed,
            "samples": self.samples,
            "batch_size": self.config.train.global_batch_size,
            "stretches": self.schedule.stretches,
            "decay": self.schedule.decay,
            "data": self.dataset.at(self.consumed).to_record(),
            "tokenizer": self.tokenizer.identity,
            "evaluated": self.step in self.validation,
        }

    def _roll_back(self, bad: RollBack) -> None:
        """Take the last checkpoint's state to behind the bad step: steps since count as skipped, with their data."""
        with self.watchdog.patient():
            del self.state  # there may not be room for two
            saved = self.restore()["step"]
        if not self.returns.add(saved, self.config.health.patience):
            raise give_up(bad, self.config, saved)
        log.warning("%s: back to the weights of step %d, going on behind step %d", bad, saved, bad.step)
        self.step, self.consumed = bad.step, bad.samples
        where = self.state.step.sharding
        number = jax.make_array_from_callback((), where, lambda _: np.int32(bad.step))
        self.state = self.state._replace(step=number)
        self.reporter.rewind(saved)

    def _listen(self, wait: bool = False) -> None:
        """Tell the other processes how this one does, and learn, at the same step as they do, what was asked for."""
        tables = self.pulse.beat([self.requests.take(), *self.reporter.pace.own_seconds()], wait)
        if tables is None:
            return
        self.request = max(self.request, Request(int(tables[..., 0].max())))
        self.seconds += tables[..., 1:].sum(axis=0)
        if self.step % self.config.log.every == 0:
            self.reporter.hosts(self.seconds, self.cluster.hosts)
            self.seconds[:] = 0

    def _interrupted(self) -> bool:
        """Tell whether a running evaluation has to end."""
        self.watchdog.beat("evaluation")
        self._listen(wait=True)
        return self.request.stops

    def _due(self, every: int | None) -> bool:
        return every is not None and self.step % every == 0 and self.step < self.steps

    def _check(self, done: StepMetrics | None) -> None:
        check_step(done, self.config, self._last_saved)

    def _last_saved(self) -> int | None:
        self._wait_for_saves()
        return self.checkpoints.latest

    def _wait_for_saves(self) -> None:
        with self.reporter.during("checkpoint"), self.watchdog.patient():
            self.checkpoints.wait()

    @contextmanager
    def _compiling(self) -> Iterator[None]:
        with self.watchdog.patient(), self.reporter.during("compile"):
            yield
        self.reporter.memory.planned = self.train_step.planned_bytes

    def say(self, text: str) -> None:
        """Print, on one process."""
        if self.cluster.first:
            print(text, flush=True)


if __name__ == "__main__":
    sys.exit(main())
