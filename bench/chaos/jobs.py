"""Jobs that the chaos test starts and follows, and the small disk to which they save."""

from __future__ import annotations

import os
import re
import resource
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import IO, NoReturn

from bench.chaos.inside import Fault
from tests.runs import start, start_job

PATIENCE = 60.0
"""Seconds within which a job has to say something, and to be gone after an event."""


@dataclass(frozen=True)
class Layout:
    """Processes, devices of each, and how the model is spread over them."""

    processes: int
    devices: int
    words: tuple[str, ...]


ONE = Layout(1, 2, ("parallel.fsdp=2", "parallel.tensor=1", "parallel.simulate_devices=2"))
TWO = Layout(2, 2, ("parallel.fsdp=2", "parallel.tensor=2"))


class HangError(Exception):
    """A job was silent, or there, for too long; its stacks are in its text."""


class Job:
    """A training job that runs, what it has said, and which processes it is."""

    def __init__(self, layout: Layout, corpus: Path, output: Path, words: list[str], fault: Fault | None) -> None:
        self.layout, self.lines, self.pids = layout, list[str](), dict[str, int]()
        cache = str(corpus.parent / "cache")
        before = f"from bench.chaos.inside import Fault, install\ninstall(rank, {fault}, {cache!r})"
        words = [*words, *layout.words]
        if layout.processes == 1:
            self.process = start(corpus, output, *words, before=f"rank = 0\n{before}")
        else:
            size = {"processes": layout.processes, "devices": layout.devices}
            self.process = start_job(corpus, output, *words, **size, before=before)
            self.pids["launcher"] = self.process.pid
        self.resumed: int | None = None
        """The step at which it went on, once it has said so."""
        self.step = 0
        """The last step that it has begun."""
        self._said: SimpleQueue[str] = SimpleQueue()
        self._streams = 2
        assert self.process.stdout and self.process.stderr
        for stream in (self.process.stdout, self.process.stderr):
            threading.Thread(target=self._listen, args=(stream,), daemon=True).start()

    @property
    def text(self) -> str:
        """Everything it has said."""
        return "".join(self.lines)

    def errors(self, rank: int) -> list[str]:
        """The lines with which a process said why it ended."""
        prefix = f"[{rank}] " if self.layout.processes > 1 else ""
        return [line for line in self.lines if line.startswith(f"{prefix}megajax: ")]

    def wait_for(self, wanted: Callable[[str], bool]) -> bool:
        """Listen until it says something; False if it has ended without.

        Raises:
            HangError: it was silent for too long.
        """
        while self._streams:
            line = self._next(PATIENCE)
            if line and wanted(line):
                return True
        return False

    def wait_for_start(self) -> bool:
        """Listen until all processes are there."""
        names = {str(rank) for rank in range(self.layout.processes)}
        return names <= self.pids.keys() or self.wait_for(lambda _: names <= self.pids.keys())

    def wait_for_resumption(self) -> bool:
        """Listen until it has said at which step it goes on."""
        return self.resumed is not None or self.wait_for(lambda _: self.resumed is not None)

    def end(self) -> float:
        """Wait until all its processes are gone; the seconds that took.

        Raises:
            HangError: too many.
        """
        begin = time.monotonic()
        while self._streams:
            self._next(begin + PATIENCE - time.monotonic())
        while any(map(_alive, self.pids.values())):
            if time.monotonic() - begin > PATIENCE:
                self._hang()
            time.sleep(0.01)
        self.process.wait()
        return time.monotonic() - begin

    def kill(self) -> None:
        """End what is left of it."""
        self._send(signal.SIGKILL)
        self.process.kill()
        self.process.wait()

    def _next(self, seconds: float) -> str:
        """The next line; nothing where a stream ends."""
        try:
            line = self._said.get(timeout=max(seconds, 0))
        except Empty:
            self._hang()
        self._streams -= not line
        self._note(line)
        return line

    def _hang(self) -> NoReturn:
        """Have it say where it hangs, and end it."""
        self._send(signal.SIGUSR2)
        time.sleep(2)
        self.kill()
        while self._streams:
            line = self._said.get()
            self._streams -= not line
            self._note(line)
        raise HangError

    def _send(self, number: signal.Signals) -> None:
        for name in self.pids.keys() - {"launcher"}:
            with suppress(ProcessLookupError):
                os.kill(self.pids[name], number)

    def _listen(self, stream: IO[str]) -> None:
        with stream:
            for line in stream:
                self._said.put(line)
        self._said.put("")

    def _note(self, line: str) -> None:
        self.lines.append(line)
        if found := re.search(r"chaos: process (\d) is (\d+)", line):
            self.pids[found[1]] = int(found[2])
        elif found := re.search(r" run: .* \((?:new|resumed at step (\d+)) of \d+ steps\)", line):
            self.resumed = int(found[1] or 0)
        elif found := re.search(r"chaos: step (\d+)", line):
            self.step = int(found[1]) + 1


def _alive(pid: int) -> bool:
    """Whether a process exists and is no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


class Disk:
    """Where checkpoints go: a small file system of its own if this process may make one."""

    def __init__(self, path: Path, megabytes: int = 32) -> None:
        path.mkdir()
        self.path = path
        command = ["mount", "-t", "tmpfs", "-o", f"size={megabytes}m", "tmpfs", str(path)]
        self.real = os.geteuid() == 0 and subprocess.run(command, capture_output=True, check=False).returncode == 0

    def close(self) -> None:
        """Away with it."""
        if self.real:
            subprocess.run(["umount", "--lazy", str(self.path)], check=True)

    @contextmanager
    def full(self, job: Job, rank: int | None) -> Iterator[None]:
        """Context in which there is no room for more. For one process, or where the disk is not our own: in no file."""
        if rank is not None or not self.real:
            for name in job.pids.keys() - {"launcher"} if rank is None else [str(rank)]:
                with suppress(ProcessLookupError):
                    resource.prlimit(job.pids[name], resource.RLIMIT_FSIZE, (64, resource.RLIM_INFINITY))
            yield
            return
        over, ballast = threading.Event(), self.path / "ballast"
        filling = threading.Thread(target=_fill, args=(ballast, over))
        filling.start()
        try:
            yield
        finally:
            over.set()
            filling.join()
            ballast.unlink()


def _fill(ballast: Path, over: threading.Event) -> None:
    """Take all room, and what becomes free when old checkpoints are deleted."""
    with ballast.open("wb", buffering=0) as file:
        while not over.wait(0.01):
            for size in (2**20, 2**12):
                with suppress(OSError):
                    while file.write(bytes(size)):
                        pass
