"""Destinations of a run's numbers: metrics.jsonl always, TensorBoard, Weights & Biases and Prometheus on request.

All of them use Megatron-LM's names of scalars: `lm loss`, `learning-rate`, `grad-norm`, `loss-scale`, `batch-size`,
`params-norm`, `iteration-time` (s), `throughput` (TFLOP/s per device), `lm loss validation`, `lm loss validation ppl`.
Prometheus has them as gauges: `megajax_lm_loss`, `megajax_iteration_time`.

metrics.jsonl is the record by which runs are compared. It has one object per line, whose content depends only on the
run, except for the member `timing`, which a comparison leaves out. After a resume it equals the file of a run that was
never interrupted.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol

from tensorboardX import FileWriter
from tensorboardX.proto.event_pb2 import Event, SessionLog
from tensorboardX.proto.summary_pb2 import Summary

from megajax.config.base import InputError
from megajax.config.config import LogConfig
from megajax.files import atomic_write, remove_leftovers

Scalars = dict[str, float]


class MetricsWriter(Protocol):
    """Write the scalars of steps to one destination."""

    def write(self, step: int, samples: int, scalars: Scalars, timing: Scalars) -> None:
        """Record the scalars of `step`, after `samples` consumed samples; those in `timing` differ from run to run."""

    def close(self) -> None:
        """Write what is pending and release the destination."""


@contextmanager
def open_writers(config: LogConfig, output_dir: Path, resumed_step: int) -> Iterator[list[MetricsWriter]]:
    """Open the destinations that `config` asks for, and close them at the end; only one process does so.

    Args:
        config: destinations, and their settings.
        output_dir: directory of the run.
        resumed_step: last step of the checkpoint from which the run continues, after which records are discarded; 0 = a
            new run.

    Raises:
        InputError: a destination's package is not installed, or the port is taken.
    """
    project, port = config.wandb_project, config.prometheus_port
    makers: list[Callable[[], MetricsWriter]] = []
    if port is not None:
        makers.append(lambda: PrometheusWriter(port))
    makers.append(lambda: JsonlWriter(output_dir / "metrics.jsonl", resumed_step))
    if config.tensorboard:
        makers.append(lambda: TensorBoardWriter(output_dir / "tensorboard", resumed_step))
    if project is not None:
        require("wandb", "wandb", "log.wandb_project")
        makers.append(lambda: WandbWriter(project, output_dir))
    with ExitStack() as stack:
        yield [stack.enter_context(closing(make())) for make in makers]


class JsonlWriter:
    """Write one JSON object per line, each in a single system call: a crash tears at most the last line."""

    def __init__(self, path: Path, resumed_step: int) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._last: list[object] = []
        remove_leftovers(path)
        if resumed_step == 0:
            path.unlink(missing_ok=True)  # written by a start that never reached a checkpoint
        elif path.exists():
            self._last = _truncate_after(path, resumed_step)
        self._file = path.open("ab")

    def write(self, step: int, samples: int, scalars: Scalars, timing: Scalars) -> None:
        """Append a line, unless an earlier start has: that of an evaluation behind the checkpoint."""
        if [step, *scalars] == self._last:
            return
        record = {"step": step, "samples": samples} | _finite(scalars) | {"timing": _finite(timing)}
        self._file.write(json.dumps(record, allow_nan=False).encode() + b"\n")
        self._file.flush()

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def _finite(scalars: Scalars) -> dict[str, float | None]:
    # JSON has no inf and nan; both mean "overflowed" here.
    return {name: value if math.isfinite(value) else None for name, value in scalars.items()}


def _truncate_after(path: Path, last_step: int) -> list[object]:
    """Drop the records of later steps, and a last line torn by a crash; return step and scalars' names of the last
    record.
    """
    last: list[object] = []
    with path.open("rb") as old, atomic_write(path) as new:
        for number, line in enumerate(old, start=1):
            if not line.endswith(b"\n"):
                break
            try:
                record = json.loads(line)
                step, names = record["step"], [name for name in record if name not in ("step", "samples", "timing")]
            except (ValueError, KeyError, TypeError):
                raise InputError(f"{path}, line {number} is not a metrics record: move the file away") from None
            if step <= last_step:
                new.write(line)
                last = [step, *names]
    return last


class TensorBoardWriter:
    """Write TensorBoard events by step, without `SummaryWriter`, which would rename `lm loss` to `lm_loss`."""

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


def require(module: str, extra: str, key: str) -> Any:
    """Import an optional dependency.

    Args:
        module: name of the Python module.
        extra: megajax's extra that installs it.
        key: configuration key that asks for it.

    Raises:
        InputError: the module is not installed.
    """
    try:
        return import_module(module)
    except ImportError:
        raise InputError(
            f"{key} is set but {module} is not installed: pip install 'megajax[{extra}]', or unset it"
        ) from None


class WandbWriter:
    """Write to a Weights & Biases run named after the output directory; a resumed run is a new one of the same name."""

    def __init__(self, project: str, output_dir: Path) -> None:
        self._run = require("wandb", "wandb", "log.wandb_project").init(
            project=project, name=output_dir.name, dir=str(output_dir)
        )

    def write(self, step: int, samples: int, scalars: Scalars, timing: Scalars) -> None:
        """Send the scalars."""
        self._run.log({"samples": samples} | scalars | timing, step=step)

    def close(self) -> None:
        """Wait for the upload and finish the run."""
        self._run.finish()


class PrometheusWriter:
    """Serve the newest value of every scalar at http://HOST:port/metrics."""

    def __init__(self, port: int) -> None:
        self._client = require("prometheus_client", "prometheus", "log.prometheus_port")
        self._registry = self._client.CollectorRegistry()
        try:
            self._server, self._thread = self._client.start_http_server(port, registry=self._registry)
        except (OSError, OverflowError) as error:
            reason = getattr(error, "strerror", None) or error
            raise InputError(f"log.prometheus_port {port} cannot be served ({reason}): choose another") from error
        self._gauges: dict[str, Any] = {}

    def write(self, step: int, samples: int, scalars: Scalars, timing: Scalars) -> None:
        """Set the gauges."""
        for name, value in ({"step": step, "samples": samples} | scalars | timing).items():
            if name not in self._gauges:
                gauge = "megajax_" + re.sub(r"\W", "_", name)
                self._gauges[name] = self._client.Gauge(gauge, name, registry=self._registry)
            self._gauges[name].set(value)

    def close(self) -> None:
        """Free the port."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
