"""From the step's device scalars to the log line and the metrics files.

The training loop hands over each step's metrics as soon as the step is dispatched; they are read one step later:

    with Reporter(config, output_dir, total_steps, resumed_step, throughput) as reporter:
        for step in ...:
            state, metrics = train_step(state, batch)
            reporter.step(step, samples, batch_size, metrics)
            if time_to_evaluate:
                reporter.flush()
                with reporter.paused():
                    loss = evaluate(state)
                reporter.evaluation(step, samples, loss, "validation")

`flush` belongs before a checkpoint too: a run resumed from it expects the records up to its step. Metrics go by
Megatron-LM's names: `lm loss`, `learning-rate`, `grad-norm`, `loss-scale`, `skipped` (0 or 1), optionally
`params-norm`, and any other, which goes to the metrics files only. Every process calls the reporter; process 0 reports.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, ExitStack
from datetime import datetime
from pathlib import Path
from types import TracebackType
from typing import Self

import jax

from megajax.config.train import LogConfig
from megajax.observe.late import LateMetrics, StepMetrics
from megajax.observe.log_line import Interval, LogRecord, format_evaluation, format_log_line, perplexity
from megajax.observe.metrics import MetricsWriter, Scalars, open_writers
from megajax.observe.progress import progress_bar
from megajax.observe.throughput import Speed, StepTimer, Throughput


class Reporter:
    """Timer, interval means, log line, progress bar and metrics files of one run; a context manager."""

    def __init__(
        self, config: LogConfig, output_dir: Path, total_steps: int, resumed_step: int, throughput: Throughput
    ) -> None:
        self._config = config
        self._output_dir = output_dir
        self._total_steps = total_steps
        self._resumed_step = resumed_step
        self._throughput = throughput
        self._late = LateMetrics()
        self._interval = Interval()
        self._writers: list[MetricsWriter] = []
        self._exit = ExitStack()
        self._reports = jax.process_index() == 0

    def __enter__(self) -> Self:
        if self._reports:
            writers = open_writers(self._config, self._output_dir, self._resumed_step)
            self._writers = self._exit.enter_context(writers)
            print(self._throughput.describe(), flush=True)
            self._advance = self._exit.enter_context(progress_bar(self._total_steps, self._resumed_step))
        self._timer = StepTimer()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        if error is None:
            self.flush()
        self._exit.close()

    def step(self, step: int, samples: int, batch_size: int, scalars: Mapping[str, jax.Array]) -> StepMetrics | None:
        """Take the metrics of the step just dispatched; report and return those of the step before.

        Args:
            step: Counted from 1.
            samples: Consumed since the start of the run, this step included.
            batch_size: Samples of this step.
            scalars: Replicated device scalars.
        """
        return self._report(self._late.push(step, samples, batch_size, scalars))

    def flush(self) -> StepMetrics | None:
        """Wait for the step that is held back, report and return it."""
        return self._report(self._late.pop())

    def paused(self) -> AbstractContextManager[None]:
        """Keep what happens inside out of the time per step."""
        return self._timer.paused()

    def evaluation(self, step: int, samples: int, loss: float, split: str) -> None:
        """Report the loss on held-out text; `split` is "validation" or "test"."""
        self._write(step, samples, {f"lm loss {split}": loss, f"lm loss {split} ppl": perplexity(loss)}, {})
        if self._reports:
            print(format_evaluation(step, loss, split), flush=True)

    def _report(self, done: StepMetrics | None) -> StepMetrics | None:
        if done is None:
            return None
        seconds = self._timer.lap()
        loss, skipped = done.scalars["lm loss"], bool(done.scalars["skipped"])
        self._interval.add(loss, skipped, done.batch_size, seconds)
        if self._reports:
            timing = _timing(self._throughput.speed(done.batch_size, seconds))
            self._write(done.step, done.samples, done.scalars | {"batch-size": done.batch_size}, timing)
            self._advance(done.step, f"loss {loss:.3f}")
            if done.step % self._config.every == 0 or done.step == self._total_steps:
                print(format_log_line(self._take_record(done), datetime.now()), flush=True)
        return done

    def _take_record(self, done: StepMetrics) -> LogRecord:
        interval, self._interval = self._interval, Interval()
        return LogRecord(
            step=done.step,
            total_steps=self._total_steps,
            samples=done.samples,
            batch_size=done.batch_size,
            speed=self._throughput.speed(interval.samples, interval.seconds, interval.steps),
            learning_rate=done.scalars["learning-rate"],
            loss=interval.loss,
            loss_scale=done.scalars["loss-scale"],
            grad_norm=done.scalars["grad-norm"],
            params_norm=done.scalars.get("params-norm"),
            skipped=interval.skipped,
            nans=interval.nans,
        )

    def _write(self, step: int, samples: int, scalars: Scalars, timing: Scalars) -> None:
        for writer in self._writers:
            writer.write(step, samples, scalars, timing)


def _timing(speed: Speed) -> dict[str, float]:
    timing = {
        "iteration-time": speed.seconds,
        "throughput": speed.tflops_per_device,
        "tokens-per-second": speed.tokens_per_second,
    }
    return timing if speed.mfu is None else timing | {"mfu": speed.mfu}
