"""Where the numbers of a run go: metrics.jsonl always, TensorBoard and Weights & Biases on request.

All of them use Megatron-LM's scalar names: `lm loss`, `learning-rate`, `grad-norm`, `loss-scale`, `batch-size`,
`params-norm`, `iteration-time` (s), `throughput` (TFLOP/s per device), `lm loss validation`, `lm loss validation ppl`.

metrics.jsonl is the record to compare runs by: one object per line, whose content depends only on the run, except for
the member `timing`, which a comparison drops. After a resume it equals the file of a run that was never interrupted.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any, Protocol

from tensorboardX import FileWriter
from tensorboardX.proto.event_pb2 import Event, SessionLog
from tensorboardX.proto.summary_pb2 import Summary

from megajax.config.base import ConfigError
from megajax.config.train import LogConfig

Scalars = dict[str, float]


class MetricsWriter(Protocol):
    """One destination."""

    def write(self, step: int, samples: int, scalars: Scalars, timing: Scalars) -> None:
        """Record scalars of `step`, after `samples` consumed samples; `timing` is what differs from run to run."""

    def close(self) -> None:
        """Flush and release."""


@contextmanager
def open_writers(config: LogConfig, output_dir: Path, resumed_step: int) -> Iterator[list[MetricsWriter]]:
    """The destinations that `config` asks for, closed at the end. For one process only.

    Args:
        config: Which ones.
        output_dir: Directory of the run.
        resumed_step: Last step of the checkpoint the run continues from; 0 = a new run. Later records are discarded.

    Raises:
        ConfigError: Weights & Biases is asked for but not installed.
    """
    project = config.wandb_project
    makers: list[Callable[[], MetricsWriter]] = [lambda: JsonlWriter(output_dir / "metrics.jsonl", resumed_step)]
    if config.tensorboard:
        makers.append(lambda: TensorBoardWriter(output_dir / "tensorboard", resumed_step))
    if project is not None:
        require_wandb()
        makers.append(lambda: WandbWriter(project, output_dir))
    with ExitStack() as stack:
        yield [stack.enter_context(closing(make())) for make in makers]


class JsonlWriter:
    """One JSON object per line, handed to the operating system in one write: a crash tears at most the last line."""

    def __init__(self, path: Path, resumed_step: int) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        if resumed_step == 0:
            path.unlink(missing_ok=True)  # of a start that never reached a checkpoint
        elif path.exists():
            _truncate_after(path, resumed_step)
        self._file = path.open("ab", buffering=0)

    def write(self, step: int, samples: int, scalars: Scalars, timing: Scalars) -> None:
        """Append a line."""
        record = {"step": step, "samples": samples} | _finite(scalars) | {"timing": _finite(timing)}
        self._file.write(json.dumps(record, allow_nan=False).encode() + b"\n")

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def _finite(scalars: Scalars) -> dict[str, float | None]:
    # JSON has no inf and nan; both mean "overflowed" here.
    return {name: value if math.isfinite(value) else None for name, value in scalars.items()}


def _truncate_after(path: Path, last_step: int) -> None:
    """Drop the records of later steps, and a last line that a crash tore."""
    shorter = path.with_suffix(".tmp")
    with path.open("rb") as old, shorter.open("wb") as new:
        for number, line in enumerate(old, start=1):
            if not line.endswith(b"\n"):
                break
            try:
                step = json.loads(line)["step"]
            except (ValueError, KeyError, TypeError):
                raise ConfigError(f"{path}, line {number} is not a metrics record: move the file away") from None
            if step <= last_step:
                new.write(line)
    shorter.replace(path)


class TensorBoardWriter:
    """TensorBoard events over steps, written below `SummaryWriter`, which would rename `lm loss` to `lm_loss`."""

    def __init__(self, directory: Path, resumed_step: int) -> None:
        self._writer = FileWriter(str(directory))
        # TensorBoard hides what an interrupted run wrote from this step on.
        first = resumed_step + 1 if resumed_step else 0
        self._writer.add_event(Event(file_version="brain.Event:2"), first)
        self._writer.add_event(Event(session_log=SessionLog(status=SessionLog.START)), first)

    def write(self, step: int, samples: int, scalars: Scalars, timing: Scalars) -> None:
        """Queue the scalars; a background thread writes them."""
        values = [Summary.Value(tag=name, simple_value=value) for name, value in (scalars | timing).items()]
        self._writer.add_summary(Summary(value=values), step)

    def close(self) -> None:
        """Write what is queued and stop the thread."""
        self._writer.close()


def require_wandb() -> Any:
    """The wandb module.

    Raises:
        ConfigError: It is not installed.
    """
    try:
        import wandb  # noqa: PLC0415 - an optional dependency
    except ImportError:
        raise ConfigError(
            "log.wandb_project is set but wandb is not installed: pip install 'megajax[wandb]', or unset it"
        ) from None
    return wandb


class WandbWriter:
    """A Weights & Biases run named after the output directory; a resumed run is a new one of the same name."""

    def __init__(self, project: str, output_dir: Path) -> None:
        self._run = require_wandb().init(project=project, name=output_dir.name, dir=str(output_dir))

    def write(self, step: int, samples: int, scalars: Scalars, timing: Scalars) -> None:
        """Send the scalars."""
        self._run.log({"samples": samples} | scalars | timing, step=step)

    def close(self) -> None:
        """Wait for the upload and finish the run."""
        self._run.finish()
