"""Reporting: each step's scalars go from the device to the log line and the metrics files.

The training loop hands over each step's metrics as soon as the step is dispatched; they are read one step later, so
that the device never waits for a log line: `float(loss)` right after dispatching a step blocks Python until that step
ends, and the device then idles until Python has dispatched the next one.

    with Reporter(config, output_dir, total_steps, resumed_step, throughput, clock) as reporter:
        for step in ...:
            with reporter.during("input"):
                batch = next(batches)
            state, metrics = train_step(state, batch)
            reporter.step(step, samples, batch_size, metrics)
            if time_to_evaluate:
                reporter.flush()
                with reporter.during("evaluation"):
                    losses = evaluate(state)
                reporter.evaluation(step, samples, losses, "validation")

Call `flush` before a checkpoint too: a run resumed from it expects the records up to its step. Metrics have
Megatron-LM's names: `lm loss`, `learning-rate`, `grad-norm`, `loss-scale`, `skipped` (0 or 1), optionally
`params-norm`, the losses of `models.losses.BESIDES`, and any other, which goes to the metrics files only. Every process
calls the reporter; process 0 reports.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from types import TracebackType
from typing import Self

import jax
import numpy as np

from megajax.config.config import LogConfig
from megajax.models.losses import BESIDES
from megajax.observe.goodput import Clock, Ledger, describe_goodput, goodput
from megajax.observe.log_line import Interval, LogRecord, format_evaluation, format_log_line, perplexity
from megajax.observe.memory import MemoryWatch
from megajax.observe.metrics import MetricsWriter, Scalars, open_writers
from megajax.observe.pace import Pace
from megajax.observe.progress import progress_bar
from megajax.observe.throughput import Throughput
from megajax.processes import take_turns


class Reporter:
    """Report one run by interval means, log line, progress bar, metrics files and goodput, as a context manager."""

    def __init__(
        self,
        config: LogConfig,
        output_dir: Path,
        total_steps: int,
        resumed_step: int,
        throughput: Throughput,
        clock: Clock,
    ) -> None:
        self._config = config
        self._output_dir = output_dir
        self._total_steps = total_steps
        self._resumed_step = resumed_step
        self._throughput = throughput
        self._clock = clock
        self._late = LateMetrics()
        self._lap: tuple[float, float] | None = None
        self._interval = Interval()
        self.pace = Pace(clock)
        self.memory = MemoryWatch()
        self._writers: list[MetricsWriter] = []
        self._exit = ExitStack()
        self._reports = jax.process_index() == 0
        self._once: Scalars = {}

    def __enter__(self) -> Self:
        if self._reports:
            self._open()
            print(self._throughput.describe(), flush=True)
            self._ledger = Ledger(self._output_dir / "goodput.json", self._clock, self._resumed_step)
            if len(self._ledger.starts) > 1:
                print(describe_goodput(self._ledger.starts), flush=True)
        self.pace.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        with self._exit:
            if error is None:
                self.flush()
            if self._reports:
                with suppress(OSError):  # an error here (a full disk, say) must not hide the run's own error
                    self._ledger.save()
                if error is None:
                    print(self.pace.describe(), describe_goodput(self._ledger.starts), sep="\n", flush=True)

    def step(self, step: int, samples: int, batch_size: int, scalars: Mapping[str, jax.Array]) -> StepMetrics | None:
        """Take the metrics of the step just dispatched; report and return those of the step before.

        Args:
            step: number of the step, counted from 1.
            samples: samples consumed since the start of the run, this step included.
            batch_size: number of samples in this step.
            scalars: metrics of the step by name, replicated device scalars.
        """
        with self._clock.during("device"):
            done = self._late.push(step, samples, batch_size, scalars)
        # If the step was waited for, it has ended here, and not only where it is read.
        lap, self._lap = self._lap, self.pace.lap() if take_turns() else None
        return self._report(done, lap)

    def flush(self) -> StepMetrics | None:
        """Wait for the step that is held back, report and return it."""
        with self._clock.during("device"):
            done = self._late.pop()
        lap, self._lap = self._lap, None
        return self._report(done, lap)

    def during(self, cause: str) -> AbstractContextManager[None]:
        """Book the block to a cause; unless the cause is "input", its time does not count in the time per step."""
        return self._clock.during(cause)

    def evaluation(self, step: int, samples: int, losses: Mapping[str, float], split: str) -> None:
        """Report the losses on held-out text by name; `split` is "validation" or "test"."""
        scalars = {f"{name} {split}": loss for name, loss in losses.items()}
        scalars |= {f"{name} {split} ppl": perplexity(loss) for name, loss in losses.items()}
        self._write(step, samples, scalars, {})
        if self._reports:
            print(format_evaluation(step, losses, split), flush=True)

    def saved(self, step: int, seconds: float, asynchronous: bool) -> None:
        """Report a checkpoint that held up training for `seconds`."""
        self._once["save-time"] = seconds
        if self._reports:
            rest = " (blocking), writing goes on" if asynchronous else ""
            print(f"saved step {step} in {seconds:.2f} s{rest}", flush=True)

    def rewind(self, step: int) -> None:
        """Go back to the checkpoint of `step`: discard the records of later steps, and count their time as lost."""
        self._late, self._lap, self._interval, self._resumed_step = LateMetrics(), None, Interval(), step
        self.pace.start()
        if self._reports:
            self._ledger.rewind(step)
            self._exit.close()
            self._open()

    def hosts(self, table: np.ndarray, names: Sequence[str]) -> None:
        """Report the processes that are slower than the others (`Pace.hosts`)."""
        text = self.pace.hosts(table, names)
        if self._reports and text:
            print(text, flush=True)

    def _open(self) -> None:
        writers = open_writers(self._config, self._output_dir, self._resumed_step)
        self._writers = self._exit.enter_context(writers)
        self._advance = self._exit.enter_context(progress_bar(self._total_steps, self._resumed_step))

    def _report(self, done: StepMetrics | None, lap: tuple[float, float] | None) -> StepMetrics | None:
        """Report a step; without a `lap` taken at its end, the step ends now, as it is read."""
        if done is None:
            return None
        seconds, input_seconds = lap or self.pace.lap()
        loss, skipped = done.scalars["lm loss"], bool(done.scalars["skipped"])
        self._interval.add(loss, skipped, done.batch_size, seconds, input_seconds)
        if self._reports:
            self._ledger.done(done.step)
            timing = self._throughput.speed(done.batch_size, seconds).scalars() | self._once
            self._once = {}
            due = done.step % self._config.every == 0 or done.step == self._total_steps
            if due:
                timing |= self._interval_timing()
            self._write(done.step, done.samples, done.scalars | {"batch-size": done.batch_size}, timing)
            self._advance(done.step, f"loss {loss:.3f}")
            if due:
                print(format_log_line(self._take_record(done), datetime.now()), flush=True)
        return done

    def _interval_timing(self) -> Scalars:
        percentiles = self.pace.percentiles(last=self._interval.steps)
        times = {f"iteration-time-{name}": seconds for name, seconds in percentiles.items()}
        return times | {"goodput": goodput(self._ledger.starts)} | self.memory.look()

    def _take_record(self, done: StepMetrics) -> LogRecord:
        interval, self._interval = self._interval, Interval()
        return LogRecord(
            step=done.step,
            total_steps=self._total_steps,
            samples=done.samples,
            batch_size=done.batch_size,
            speed=self._throughput.speed(interval.samples, interval.seconds, interval.steps),
            input_share=interval.input_seconds / interval.seconds,
            learning_rate=done.scalars["learning-rate"],
            loss=interval.loss,
            others={name: done.scalars[name] for name in BESIDES if name in done.scalars},
            loss_scale=done.scalars["loss-scale"],
            grad_norm=done.scalars["grad-norm"],
            params_norm=done.scalars.get("params-norm"),
            skipped=interval.skipped,
            nans=interval.nans,
        )

    def _write(self, step: int, samples: int, scalars: Scalars, timing: Scalars) -> None:
        for writer in self._writers:
            writer.write(step, samples, scalars, timing)


@dataclass(frozen=True)
class StepMetrics:
    """The scalars of one finished step and its place in the run."""

    step: int
    """Number of the step, counted from 1."""
    samples: int
    """Samples consumed since the start of the run, this step included."""
    batch_size: int
    """Number of samples in this step."""
    scalars: dict[str, float]


class LateMetrics:
    """Hold back the newest step, so that reading the step before does not wait for it."""

    def __init__(self) -> None:
        self._held: tuple[int, int, int, Mapping[str, jax.Array]] | None = None

    def push(self, step: int, samples: int, batch_size: int, scalars: Mapping[str, jax.Array]) -> StepMetrics | None:
        """Hold the step just dispatched (replicated device scalars) and return the step before, or None at first."""
        for scalar in scalars.values():
            scalar.copy_to_host_async()
        ready, self._held = self.pop(), (step, samples, batch_size, scalars)
        return ready

    def pop(self) -> StepMetrics | None:
        """Wait for the step that is held back and return it, or None if there is none."""
        if self._held is None:
            return None
        step, samples, batch_size, scalars = self._held
        self._held = None
        return StepMetrics(step, samples, batch_size, {name: float(value) for name, value in scalars.items()})
