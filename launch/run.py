"""`python -m launch.run --max-restarts N [...] -- COMMAND`: a job that is started again when it crashes.

    python -m launch.run --max-restarts 5 --processes 4 --min-processes 2 -- python -m megajax.train CONFIG.yaml

A run goes on from its newest checkpoint by itself, so starting it again is all there is to do. That helps after a
crash, a lost process or a hang, and not after exit codes 0 (done), 2 (bad input), 3 (diverged: it would diverge again)
and 130 (interrupted). `--max-restarts` counts all restarts, as torchrun does. SIGTERM goes to the job, which saves and
ends.

With `--min-processes`, a job that was restarted and dies again before there is a newer checkpoint goes on with fewer
processes: the next smaller number for which mesh and batch sizes are legal (parallel.data=auto makes room for that; the
order of the data does not depend on it). Where another launcher starts the processes, `{processes}` in the command is
replaced by their number, and the supervisor starts that command once:

    ... --processes 8 --min-processes 4 -- srun --nodes={processes} python -m megajax.train CONFIG.yaml
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from etils import epath

from launch.gpus import visible_gpus
from launch.local import Signals, add_process_options, clean_command, describe, environments, positive, run_processes
from megajax.config import Config, InputError, check_batch, resolve_mesh
from megajax.config.cli import OneLineParser, entry_point, parse_command_line
from megajax.training.batch_size import BatchSizeRamp
from megajax.training.run_directory import RunDirectory

FINAL = (0, 2, 3, 130)
"""Exit codes after which a restart would do the same again."""
PLACEHOLDER = "{processes}"


@entry_point
def main(argv: list[str]) -> int:
    """Run the command line and return the exit code of the job."""
    parser = OneLineParser(prog="python -m launch.run", description=__doc__, allow_abbrev=False)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--max-restarts", type=int, required=True, help="restarts in all")
    parser.add_argument("--min-processes", type=positive, help="go on with fewer processes, but no fewer than these")
    parser.add_argument("--backoff", type=float, default=5.0, help="seconds before a restart")
    add_process_options(parser)
    options = parser.parse_args(argv)
    command = clean_command(options.command)
    run = Run.of(command, options.processes, options.devices)
    if options.min_processes and run.config is None:
        raise InputError("--min-processes needs a command with megajax.train, to know which numbers are legal")
    return supervise(run, command, options)


@dataclass(frozen=True)
class Run:
    """The supervisor's knowledge of the run that a command starts."""

    config: Config | None
    """The configuration of the run, or None if the command is not `megajax.train`."""
    devices: int
    """The number of devices that each process has."""

    @classmethod
    def of(cls, command: Sequence[str], processes: int, devices: int) -> Run:
        """Read the configuration that the command will read.

        Raises:
            InputError: it would refuse it.
        """
        config = None
        if "megajax.train" in command:
            words = with_number(command[command.index("megajax.train") + 1 :], processes)
            config = parse_command_line("python -m megajax.train", "", words, read_start)[0].config
            devices = devices or config.parallel.simulate_devices
        here = len(visible_gpus())
        return cls(config, devices or (here if PLACEHOLDER in " ".join(command) else here // processes))

    def newest_step(self) -> int | None:
        """Return the number of the newest checkpoint; None if there is none, or if that cannot be told."""
        if self.config is None:
            return None
        directory = self._checkpoints(self.config)
        try:
            names = [path.name for path in directory.iterdir()] if directory.exists() else []
        except OSError:  # a file system that is away for a while ends no supervisor
            return None
        return max((int(name) for name in names if name.isdigit()), default=None)

    def how_far(self, step: int | None) -> str:
        """Say what exit code 0 means at this newest checkpoint; a time limit or a request to stop ends with it too."""
        last = None if self.config is None or step is None else self._last_step(self.config, step)
        if step is None or last is None or step >= last:
            return "done"
        return f"stopped on request before step {last}: the same command goes on"

    def _last_step(self, config: Config, step: int) -> int | None:
        """Return the number of the last step; a run that is counted in samples needs a checkpoint's record for it."""
        if config.train.steps:
            return config.train.steps
        record = self._checkpoints(config) / f"{step}" / "record" / "metadata"
        try:
            consumed = json.loads(record.read_text())["consumed_samples"]
        except (OSError, ValueError, KeyError):
            return None
        return step + BatchSizeRamp.from_config(config.train).steps_for_samples(config.train.samples or 0, consumed)

    def _checkpoints(self, config: Config) -> epath.Path:
        return epath.Path(RunDirectory(Path(config.output_dir)).checkpoints(config.checkpoint))

    def fewer(self, processes: int, least: int) -> int | None:
        """Return the next smaller number of processes that the configuration allows, or None."""
        return next(filter(self.allows, range(processes - 1, least - 1, -1)), None)

    def allows(self, processes: int) -> bool:
        """Tell whether mesh and batch sizes are legal for this number of processes."""
        if self.config is None or not self.devices:
            return False
        try:
            mesh = resolve_mesh(self.config.parallel, processes * self.devices)
            check_batch(self.config.train, self.config.parallel, mesh["data"])
        except InputError:
            return False
        return True


def read_start(init_from: str, output_dir: str) -> Mapping[str, Any]:
    """Return the values that `init_from` implies by key, read as training reads them."""
    from megajax.interop.init_from import start_of  # noqa: PLC0415 - brings JAX, of no other use to a supervisor

    return start_of(init_from, output_dir)


def supervise(run: Run, command: Sequence[str], options: argparse.Namespace) -> int:
    """Start the job until it ends for good, and return its exit code."""
    processes, restarts = options.processes, 0
    with Signals() as signals:
        while True:
            before = run.newest_step()
            report(f"start {restarts + 1} of at most {options.max_restarts + 1}: {processes} process(es), {at(before)}")
            code = start(run, command, processes, options, signals)
            after = run.newest_step()
            ended = f"ended with {describe(code)}, {at(after)}"
            if code in FINAL or signals.stop or restarts == options.max_restarts:
                report(f"{ended}: {run.how_far(after) if code == 0 else why_final(code, signals)}")
                return code
            report(f"{ended}: restart in {options.backoff:g} s")
            if restarts and after == before and options.min_processes:
                processes = shrink(run, processes, options.min_processes)
            restarts += 1
            if not wait(options.backoff, signals):
                report(f"{signals.stop} was received: no restart")
                return code


def why_final(code: int, signals: Signals) -> str:
    """Say why there is no restart."""
    if code in FINAL:
        return "a restart would not change that"
    return f"{signals.stop} was received" if signals.stop else "no restart left"


def start(run: Run, command: Sequence[str], processes: int, options: argparse.Namespace, signals: Signals) -> int:
    """Start the job once, by this launcher or by the one that the command names."""
    gpus = None
    if any(PLACEHOLDER in word for word in command):
        command, processes = with_number(command, processes), 1
    elif processes < options.processes and not options.devices:  # no more GPUs for each than they had
        gpus = visible_gpus()[: processes * run.devices]
    return run_processes(command, environments(processes, options.devices, gpus), signals, options.grace)


def with_number(words: Sequence[str], processes: int) -> list[str]:
    """Fill the number of processes into the words of the command."""
    return [word.replace(PLACEHOLDER, str(processes)) for word in words]


def shrink(run: Run, processes: int, least: int) -> int:
    """Return a smaller number of processes if the run allows one, and print what was decided."""
    fewer = run.fewer(processes, least)
    if fewer is None:
        report(
            f"no progress since the last start; no number from {least} to {processes - 1} is legal: {processes} again"
        )
        return processes
    report(f"no progress since the last start: going on with {fewer} instead of {processes} processes")
    return fewer


def wait(seconds: float, signals: Signals) -> bool:
    """Wait for some seconds; return False as soon as somebody asks to stop."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline and not signals.stop:
        time.sleep(min(0.1, seconds))
    return not signals.stop


def at(step: int | None) -> str:
    """Say where the run has its directory."""
    return "no checkpoint" if step is None else f"newest checkpoint: step {step}"


def report(message: str) -> None:
    """Print one dated line on stderr."""
    print(f"{time.strftime('%Y-%m-%d %H:%M:%S')} launch.run: {message}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
