"""Events that strike a job, their moments, and the way in which the job then has to end."""

from __future__ import annotations

import os
import random
import re
import signal
import time
from abc import ABC, abstractmethod
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar

from bench.chaos.inside import ERROR, Fault
from bench.chaos.jobs import Disk, Job, Layout

MARKS = {
    "step": r"chaos: step (\d+)",
    "save": r"chaos: save (\d+)",
    "write": r"saved step (\d+) in",  # from here on in the background
    "evaluation": r"chaos: evaluation (\d+)",
}
LONGEST_DELAY = {"step": 0.06, "save": 0.1, "write": 0.3, "evaluation": 0.1}


@dataclass(frozen=True)
class Moment:
    """So long after the start, or after the first of its marks that follows so many steps."""

    phase: str
    after: int
    delay: float

    @classmethod
    def draw(cls, rng: random.Random, steps: int, start_seconds: float, phases: list[str]) -> Moment:
        """A moment within the next `steps` steps."""
        phase = rng.choice(phases)
        return cls(phase, rng.randint(1, steps), rng.uniform(0, LONGEST_DELAY.get(phase, start_seconds)))

    def wait(self, job: Job) -> bool:
        """Wait for it; False if the job has ended before."""
        if self.phase == "start-up":
            there = job.wait_for_start()
        else:
            there = job.wait_for_resumption() and job.wait_for(lambda line: self._is_marked(line, job.resumed or 0))
        if there:
            time.sleep(self.delay)
        return there

    def _is_marked(self, line: str, resumed: int) -> bool:
        found = re.search(MARKS[self.phase], line)
        return found is not None and int(found[1]) >= resumed + self.after

    def __str__(self) -> str:
        return f"{self.phase} +{self.delay:.2f} s"


@dataclass(frozen=True)
class Event(ABC):
    """Something that happens to a job, once."""

    moment: Moment

    kind: ClassVar = ""

    @property
    def fault(self) -> Fault | None:
        """What it needs inside of the job's processes."""
        return None

    def wait(self, job: Job) -> bool:
        """Wait for its moment; False if the job has ended before."""
        return self.moment.wait(job)

    @abstractmethod
    def strike(self, job: Job, disk: Disk) -> AbstractContextManager[None]:
        """Do it; what it takes lasts as long as the context."""

    @abstractmethod
    def problem(self, job: Job, code: int, saved: int | None) -> str:
        """What is wrong with how the job has ended; `saved` is its newest checkpoint."""


@dataclass(frozen=True)
class Kill(Event):
    """SIGKILL to a process or the launcher."""

    target: str
    """"launcher", or the number of a process."""

    kind = "SIGKILL"

    def strike(self, job: Job, disk: Disk) -> AbstractContextManager[None]:
        with suppress(ProcessLookupError):
            os.kill(job.pids[self.target], signal.Signals[self.kind])
        return nullcontext()

    def problem(self, job: Job, code: int, saved: int | None) -> str:
        return "" if code else "exit code 0"

    def __str__(self) -> str:
        return f"{self.kind} to {self.target if self.target == 'launcher' else f'process {self.target}'}"


class Terminate(Kill):
    """SIGTERM, which a process that has not come to training yet does not survive."""

    kind = "SIGTERM"

    def problem(self, job: Job, code: int, saved: int | None) -> str:
        if job.resumed is None:
            return "" if code else "exit code 0 before anything was saved"
        said = re.search(r"SIGTERM: step (\d+) of \d+ is saved", job.text)
        if code or not said:
            return f"exit code {code}, {'said' if said else 'did not say'} that it saved"
        if not int(said[1]) == job.step == saved:
            return f"was at step {job.step}, said that it saved {said[1]}, saved {saved}"
        return ""


@dataclass(frozen=True)
class Fill(Event):
    """No room for checkpoints any more, until the job has ended."""

    rank: int | None
    """The process that has none; unset = all."""

    kind = "disk full"

    def strike(self, job: Job, disk: Disk) -> AbstractContextManager[None]:
        return disk.full(job, self.rank)

    def problem(self, job: Job, code: int, saved: int | None) -> str:
        if code != 2 or "Traceback" in job.text:
            return f"exit code {code}" + ", a traceback" * ("Traceback" in job.text)
        said = [job.errors(rank) for rank in range(job.layout.processes)]
        if not all(said) or not all(re.search("No space|too large", line) for lines in said for line in lines):
            return f"said {said}"
        return ""

    def __str__(self) -> str:
        return self.kind + ("" if self.rank is None else f" for process {self.rank}")


@dataclass(frozen=True)
class Raise(Event):
    """An exception in one process."""

    rank: int

    kind = "raise"

    @property
    def fault(self) -> Fault:
        return Fault(self.rank, self.moment.phase, 0 if self.moment.phase == "start-up" else self.moment.after)

    def wait(self, job: Job) -> bool:
        return job.wait_for_start() and job.wait_for(lambda line: "chaos: raising" in line)

    def strike(self, job: Job, disk: Disk) -> AbstractContextManager[None]:
        return nullcontext()

    def problem(self, job: Job, code: int, saved: int | None) -> str:
        if code != 1:
            return f"exit code {code}"
        if job.layout.processes == 1:
            return "" if f"RuntimeError: {ERROR}" in job.text else "the error is not in its log"
        for rank in range(job.layout.processes):
            if not any(f"process {self.rank} (" in line and ERROR in line for line in job.errors(rank)):
                return f"process {rank} does not name the error"
        return ""

    def __str__(self) -> str:
        return f"process {self.rank} raises"


def draw(kind: str, rng: random.Random, layout: Layout, steps: int, start_seconds: float, late: bool) -> Event:
    """An event of a kind within the next `steps` steps; `late`: not before the job has restored its state."""
    phases = ["start-up"] * (not late) + ["step", "save", "evaluation"] + ["write"] * (kind != "raise")
    moment = Moment.draw(rng, steps, start_seconds, phases)
    rank = rng.randrange(layout.processes)
    target = "launcher" if layout.processes > 1 and rng.random() < 1 / 3 else str(rank)
    if kind == "disk full":
        return Fill(moment, rng.choice([None, rank]))
    if kind == "raise":
        return Raise(replace(moment, delay=0.0), rank)
    return Terminate(moment, target) if kind == "SIGTERM" else Kill(moment, target)


def damage(checkpoint: Path, rng: random.Random) -> tuple[str, bool]:
    """Damage a random file of a checkpoint; what was done, and whether it cannot be harmless."""
    files = sorted(path for path in checkpoint.rglob("*") if path.is_file() and path.stat().st_size)
    arrays = [path for path in files if path.parent.parent.name == "state" and path.name != ".zarray"]
    others = [path for path in files if path not in arrays]
    record = [path for path in files if path.parent.name == "record" and path.name == "metadata"]
    path = rng.choice(rng.choice([arrays, arrays, others, record]))
    content = bytearray(path.read_bytes())
    how = rng.choice(["cut", "flip", "remove"])
    if how == "cut":
        os.truncate(path, rng.randrange(len(content)))
    elif how == "flip":
        content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
        path.write_bytes(content)
    else:
        path.unlink()
    # A missing piece of zeros is a piece of zeros.
    return f"{how} {path.relative_to(checkpoint.parent)}", path in arrays and (how != "remove" or any(content))
