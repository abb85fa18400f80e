"""The progress line: Megatron-LM's fields in Megatron-LM's order, so that its log parsers work, then further fields.

    [2025-01-31 12:00:00.000000] iteration      100/    1000 | consumed samples:         6400 | elapsed time per ... |

After the standard fields come `tokens per second: ... | MFU (%): ... | input wait (%): ... |` in the same form.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime

from megajax.observe.throughput import Speed


@dataclass
class Interval:
    """Sum up the steps since the last log line."""

    steps: int = 0
    samples: int = 0
    seconds: float = 0.0
    input_seconds: float = 0.0
    """Seconds, out of `seconds`, that were spent waiting for a batch."""
    skipped: int = 0
    nans: int = 0
    loss_sum: float = 0.0

    def add(self, loss: float, skipped: bool, samples: int, seconds: float, input_seconds: float) -> None:
        """Count one step; as in Megatron-LM, the loss of a skipped step does not enter the mean."""
        self.steps += 1
        self.samples += samples
        self.seconds += seconds
        self.input_seconds += input_seconds
        if skipped:
            self.skipped += 1
            self.nans += not math.isfinite(loss)
        else:
            self.loss_sum += loss

    @property
    def loss(self) -> float | None:
        """Return the mean loss over the steps that were not skipped, or None if there are none."""
        taken = self.steps - self.skipped
        return self.loss_sum / taken if taken else None


@dataclass(frozen=True, kw_only=True)
class LogRecord:
    """The values of one log line, about the steps since the line before."""

    step: int
    total_steps: int
    samples: int
    """Samples consumed since the start of the run."""
    batch_size: int
    """Number of samples in the last step."""
    speed: Speed
    """Mean speed over the interval."""
    input_share: float
    """Fraction of the interval that was spent waiting for batches."""
    learning_rate: float
    """Learning rate of the last step; loss scale and norms are those of the last step as well."""
    loss: float | None
    """Mean loss of the steps that were not skipped; None if there are none."""
    others: Mapping[str, float] = field(default_factory=dict)
    """Other losses of the last step."""
    loss_scale: float
    grad_norm: float
    params_norm: float | None = None
    skipped: int
    """Number of steps skipped in the interval."""
    nans: int
    """Number of skipped steps whose loss itself was not finite."""


def format_log_line(record: LogRecord, now: datetime) -> str:
    """Return the log line, which starts with a space and ends with ` |` like Megatron-LM's."""
    r = record
    fields = [
        f"iteration {r.step:8d}/{r.total_steps:8d}",
        f"consumed samples: {r.samples:12d}",
        f"elapsed time per iteration (ms): {r.speed.seconds * 1e3:.1f}",
        f"throughput per GPU (TFLOP/s/GPU): {r.speed.tflops_per_device:.1f}",
        f"learning rate: {r.learning_rate:.6E}",
        f"global batch size: {r.batch_size:5d}",
        *([f"lm loss: {r.loss:.6E}"] if r.loss is not None else []),
        *(f"{name}: {loss:.6E}" for name, loss in r.others.items()),
        f"loss scale: {r.loss_scale:.1f}",
        f"grad norm: {r.grad_norm:.3f}",
        *([f"params norm: {r.params_norm:.3f}"] if r.params_norm is not None else []),
        f"number of skipped iterations: {r.skipped:3d}",
        f"number of nan iterations: {r.nans:3d}",
        f"tokens per second: {r.speed.tokens_per_second:.1f}",
        f"MFU (%): {f'{r.speed.mfu * 100:.1f}' if r.speed.mfu is not None else 'n/a'}",
        f"input wait (%): {r.input_share * 100:.1f}",
    ]
    return f" [{now:%Y-%m-%d %H:%M:%S.%f}] " + " | ".join(fields) + " |"


def format_evaluation(step: int, losses: Mapping[str, float], split: str) -> str:
    """Return Megatron-LM's three lines after an evaluation; `split` is "validation" or "test"."""
    values = (f"{name} value: {loss:.6E} | {name} PPL: {perplexity(loss):.6E} | " for name, loss in losses.items())
    line = f" {split} loss at iteration {step} | {''.join(values)}"
    rule = "-" * (len(line) + 1)
    return f"{rule}\n{line}\n{rule}"


def perplexity(loss: float) -> float:
    """Return exp(loss), with the loss cut at 20 as Megatron-LM reports it."""
    return math.exp(min(20.0, loss))
