"""`python -m launch.local --processes N [--devices D] -- COMMAND`: a multi-process job on this machine.

    python -m launch.local --processes 2 --devices 4 -- python -m megajax.train configs/quickstart.yaml

Every process gets the variables that torchrun sets (by which megajax.cluster deals out the GPUs), or D simulated CPU
devices. Its output appears line by line behind its number. SIGTERM, SIGINT and SIGUSR1 go on to all processes. The
first process that fails ends the job: the others have some seconds to leave by themselves, then comes SIGTERM, then
SIGKILL, and its exit code is that of the launcher. Should the launcher itself be killed, the kernel kills the processes
(PR_SET_PDEATHSIG).
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import os
import selectors
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import FrameType, TracebackType
from typing import IO, Any, Self

from launch.env import announce_changes
from megajax.config.base import InputError
from megajax.config.cli import OneLineParser, entry_point

PR_SET_PDEATHSIG = 1
POLL_SECONDS = 0.1
GRACE_SECONDS = 10.0
FORWARDED = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)


@entry_point
def main(argv: list[str]) -> int:
    """Run the command line and return the exit code of the job."""
    parser = OneLineParser(prog="python -m launch.local", description=__doc__, allow_abbrev=False)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    add_process_options(parser)
    options = parser.parse_args(argv)
    command = clean_command(options.command)
    with Signals() as signals:
        return run_processes(command, environments(options.processes, options.devices), signals, options.grace)


def add_process_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that `launch.local` and `launch.run` share."""
    parser.add_argument("--processes", type=positive, default=1, help="processes to start; one is started as it is")
    parser.add_argument("--devices", type=positive, default=0, help="simulated CPU devices of each, instead of GPUs")
    parser.add_argument("--grace", type=float, default=GRACE_SECONDS, help="seconds to leave once one has failed")
    parser.add_argument("command", nargs=argparse.REMAINDER, metavar="-- COMMAND", help="what every process runs")


def positive(text: str) -> int:
    """Read a whole number from 1 on, as a type of argparse."""
    if not text.isdecimal() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from 1 on")
    return int(text)


def clean_command(words: Sequence[str]) -> list[str]:
    """Return the words of the command, without the `--` before them."""
    command = list(words[1:] if words[:1] == ["--"] else words)
    if not command:
        raise InputError("nothing to start: give a command after --, such as -- python -m megajax.train CONFIG.yaml")
    return command


def environments(processes: int, devices: int = 0, gpus: Sequence[str] | None = None) -> list[dict[str, str]]:
    """Return the environment of each process: torchrun's variables, its devices, the settings of its GPU.

    Args:
        processes: How many.
        devices: Simulated CPU devices of each; 0 = whatever JAX finds.
        gpus: GPUs that they share evenly; None = all there are.
    """
    base = dict(os.environ)
    if devices:
        base |= {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": str(devices)}
    else:
        base |= announce_changes(base)
    if gpus is not None:
        base |= {"CUDA_VISIBLE_DEVICES": ",".join(gpus)}
    if processes == 1:
        return [base]
    base |= {"PYTHONUNBUFFERED": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": str(_free_port())}
    base |= {"WORLD_SIZE": str(processes), "LOCAL_WORLD_SIZE": str(processes)}
    return [base | {"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(processes)]


def _free_port() -> int:
    with socket.create_server(("localhost", 0)) as server:
        return int(server.getsockname()[1])


def say(message: str) -> None:
    """Print a line of the launcher's own on stderr."""
    print(f"launch: {message}", file=sys.stderr, flush=True)


class Signals:
    """A context that notes the signals meant for the job, so that they can be passed on to its processes."""

    def __init__(self) -> None:
        """Nothing has arrived."""
        self.stop = ""
        """The first signal that asks the job to stop for good, SIGTERM or SIGINT."""
        self._arrived: list[signal.Signals] = []
        self._previous: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Self:
        for number in FORWARDED:
            self._previous[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        name = signal.Signals(number)
        self._arrived.append(name)
        if name != signal.SIGUSR1:
            self.stop = self.stop or name.name

    def take(self) -> list[signal.Signals]:
        """Return the signals that have arrived since the last call."""
        arrived, self._arrived = self._arrived, []
        return arrived


def run_processes(
    command: Sequence[str], environment: Sequence[Mapping[str, str]], signals: Signals, grace: float = GRACE_SECONDS
) -> int:
    """Run `command` once in every environment until all have ended.

    Returns:
        0, or the exit code of the first process that failed; 128 + its number for a signal, as shells have it.
    """
    escalation = [(grace, signal.SIGTERM), (2 * grace, signal.SIGKILL)]
    failed_at = float("inf")
    with _Job(command, environment) as job:
        while job.running():
            job.pass_output_on(POLL_SECONDS)
            for number in signals.take():
                job.send(number)
            if job.first_failure:
                failed_at = min(failed_at, time.monotonic())
            while escalation and time.monotonic() - failed_at >= escalation[0][0]:
                job.send(escalation.pop(0)[1])
    return job.first_failure


@dataclass
class _Output:
    """One stream of one process, and the beginning of its next line."""

    prefix: bytes
    target: IO[Any]
    line: bytes = field(default=b"")

    def add(self, data: bytes) -> None:
        *lines, self.line = (self.line + data).split(b"\n")
        for line in lines:
            self._write(line)

    def end(self) -> None:
        if self.line:
            self._write(self.line)

    def _write(self, line: bytes) -> None:
        self.target.write((self.prefix + line + b"\n").decode(errors="replace"))
        self.target.flush()


class _Job:
    """The processes of a job. Everything happens in one thread, so lines never mix."""

    def __init__(self, command: Sequence[str], environment: Sequence[Mapping[str, str]]) -> None:
        self.first_failure = 0
        self._size = len(environment)
        self._left: dict[int, subprocess.Popen[bytes]] = {}
        self._selector = selectors.DefaultSelector()
        for rank, variables in enumerate(environment):
            process = self._left[rank] = _start(command, variables, piped=self._size > 1)
            for stream, target in ((process.stdout, sys.stdout), (process.stderr, sys.stderr)):
                if stream is not None:
                    self._selector.register(stream, selectors.EVENT_READ, _Output(f"[{rank}] ".encode(), target))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.send(signal.SIGKILL)
        for process in self._left.values():
            process.wait()
        while self.pass_output_on(0):
            pass
        for key in list(self._selector.get_map().values()):  # held open by something that left its process group
            self._close(key)
        self._selector.close()

    def running(self) -> bool:
        """Note how processes have ended, and tell whether any is left."""
        for rank, process in list(self._left.items()):
            if os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
                continue
            _kill_group(process)  # what it may have left behind, while its number is still its own
            code = process.wait()
            del self._left[rank]
            code = 128 - code if code < 0 else code
            self.first_failure = self.first_failure or code
            if code and self._size > 1:
                say(f"process {rank} ended with {describe(code)}")
        return bool(self._left)

    def send(self, number: signal.Signals) -> None:
        """Send a signal to every process that is left; SIGKILL also goes to the processes that it has started."""
        if self._left:
            say(f"{number.name} goes to {len(self._left)} process(es)")
        for process in self._left.values():
            if number == signal.SIGKILL:
                _kill_group(process)
            else:
                process.send_signal(number)

    def pass_output_on(self, seconds: float) -> bool:
        """Wait for output and print its whole lines; return whether there was any."""
        if not self._selector.get_map():
            time.sleep(seconds)
            return False
        ready = self._selector.select(seconds)
        for key, _ in ready:
            data = os.read(key.fd, 1 << 16)
            key.data.add(data)
            if not data:
                self._close(key)
        return bool(ready)

    def _close(self, key: selectors.SelectorKey) -> None:
        key.data.end()
        self._selector.unregister(key.fileobj)
        key.fileobj.close()  # type: ignore[union-attr]


def describe(code: int) -> str:
    """Describe an exit code in words."""
    meanings = {1: "an error", 2: "bad input", 3: "diverged", 4: "hung", 5: "not ready", 130: "interrupted"}
    if code in meanings or code <= 128:
        return f"exit code {code}" + (f" ({meanings[code]})" if code in meanings else "")
    try:
        return f"exit code {code} ({signal.Signals(code - 128).name})"
    except ValueError:
        return f"exit code {code}"


def _start(command: Sequence[str], environment: Mapping[str, str], piped: bool) -> subprocess.Popen[bytes]:
    # A session of its own: Ctrl-C in a terminal reaches the launcher alone, and a job gets it once, not twice.
    parent, libc = os.getpid(), ctypes.CDLL(None)

    def die_with_the_launcher() -> None:
        if hasattr(libc, "prctl"):  # Linux
            libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
            if os.getppid() != parent:
                os._exit(1)

    stream = subprocess.PIPE if piped else None
    try:
        return subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=stream,
            stderr=stream,
            start_new_session=True,
            preexec_fn=die_with_the_launcher,  # noqa: PLW1509 - there is one thread
        )
    except OSError as error:
        raise InputError(f"{command[0]} cannot be started ({error.strerror}): check the command") from error


def _kill_group(process: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


if __name__ == "__main__":
    sys.exit(main())
