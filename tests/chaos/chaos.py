"""`python -m tests.chaos.chaos --events 50 --seed 0`: runs that are struck again and again, and have to come out the same.

Real jobs of one and two processes are killed, asked to leave, run out of disk, raise exceptions and find their newest
checkpoint damaged, at random moments. Each run goes on, start after start, until it has finished; then its last
checkpoint is compared byte by byte, and its metrics record by record, with those of a run that nothing happened to.
Exit code 1 if anything was wrong. A seed stands for the same events; their moments depend on the machine besides.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from tests.chaos.events import Event, damage
from tests.chaos.jobs import Disk, HangError, Job, Layout
from tests.runs import arrays, records

DECK = ["kill"] * 4 + ["SIGTERM", "disk full", "raise", "damage"] * 2
STEPS = 120
WORDS = [f"train.steps={STEPS}", "checkpoint.every=6", "checkpoint.keep_last=3", "evaluation.every=9"]


@dataclass
class Outcome:
    """What happened, and what came of it."""

    kind: str
    what: str
    when: str = "between starts"
    code: int | None = None
    seconds: float | None = None
    resumed: int | None = None
    problems: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        code = "" if self.code is None else f"exit {self.code}"
        gone = "" if self.seconds is None else f"gone in {self.seconds:.1f} s"
        resumed = "struck again before it resumed" if self.resumed is None else f"resumed at {self.resumed}"
        words = [f"{self.what:44}", f"{self.when:20}", f"{code:8}", f"{gone:14}", resumed, *self.problems]
        return " | ".join(words)


@dataclass(frozen=True)
class Reference:
    """What an undisturbed run came to."""

    arrays: dict[str, np.ndarray]
    records: list[dict[str, Any]]
    start_seconds: float
    """From the birth of its processes to the end of its first step."""


class Run:
    """One training run, from its first start to its finish."""

    def __init__(self, name: str, layout: Layout, scratch: Path, disk: Disk, words: Sequence[str] = WORDS) -> None:
        self.layout, self.disk, self.words = layout, disk, words
        self.corpus, self.output, self.saves = scratch / "numbers.jsonl", scratch / name, disk.path / name
        self.outcomes: list[Outcome] = []
        self.problems: list[str] = []
        self._logs = 0
        self._allowed: set[int] | None = None

    @property
    def steps(self) -> list[int]:
        """Steps of the finished checkpoints, ascending; 0 stands for the start without one."""
        found = (self.saves / "checkpoints").glob("*[0-9]")
        return [0, *sorted(int(path.name) for path in found if path.name.isdigit() and path.name != "0")]

    def strike(self, event: Event) -> Outcome | None:
        """Start, let it happen, see how the job ends; None if it ended before."""
        with self._job(event) as job:
            if not event.wait(job):
                self._judge_resumption(job)
                job.end()
                self._complain(f"ended with exit code {job.process.returncode} before {event}")
                return None
            with event.strike(job, self.disk):
                seconds = job.end()
            self._judge_resumption(job)
            outcome = Outcome(event.kind, str(event), str(event.moment), job.process.returncode, seconds)
            if problem := event.problem(job, job.process.returncode, self.steps[-1]):
                outcome.problems.append(problem)
        self.outcomes.append(outcome)
        return outcome

    def damage(self, rng: random.Random) -> Outcome:
        """Damage the newest checkpoint."""
        *_, before, newest = self.steps
        what, is_fatal = damage(self.saves / "checkpoints" / str(newest), rng)
        self._allowed = {before} if is_fatal else {before, newest}
        outcome = Outcome("damage", what)
        self.outcomes.append(outcome)
        return outcome

    def finish(self) -> Reference:
        """Start it, undisturbed, until it is done."""
        with self._job(None) as job:
            job.wait_for_start()
            born = time.monotonic()
            job.wait_for(lambda line: job.step - (job.resumed or 0) > 1)
            seconds = time.monotonic() - born
            while job.wait_for(lambda line: False):
                pass
            job.end()
            self._judge_resumption(job)
            if job.process.returncode or f"finished {STEPS} steps" not in job.text:
                self._complain(f"exit code {job.process.returncode} from the last start")
        return Reference(arrays(self.saves, self.steps[-1]), records(self.output), seconds)

    def compare(self, found: Reference, expected: Reference) -> None:
        """Complain about what differs."""
        for name in found.arrays.keys() | expected.arrays.keys():
            if name not in found.arrays or found.arrays[name].tobytes() != expected.arrays[name].tobytes():
                self._complain(f"{name} differs")
        # A signal to stop skips an evaluation that is due at that step.
        stopped = {outcome.resumed for outcome in self.outcomes if outcome.kind == "SIGTERM"}
        missing = [line for line in expected.records if line not in found.records]
        more = [line for line in found.records if line not in expected.records]
        if more or not all("lm loss validation" in line and line["step"] in stopped for line in missing):
            self._complain(f"metrics differ: without {missing[:2]}, with {more[:2]}")

    @contextmanager
    def _job(self, event: Event | None) -> Iterator[Job]:
        words = [*self.words, f"checkpoint.directory={self.saves / 'checkpoints'}"]
        if self._allowed is None:
            self._allowed = {self.steps[-1]}
        job = Job(self.layout, self.corpus, self.output, words, event.fault if event else None)
        try:
            yield job
        except HangError as error:
            self._complain(f"HANG: {error}")
            job.kill()
        finally:
            self._logs += 1
            self.output.with_name(f"{self.output.name}-{self._logs}.log").write_text(job.text)

    def _judge_resumption(self, job: Job) -> None:
        """Whether it went on at the newest good checkpoint."""
        if job.resumed is None:
            return
        for outcome in reversed(self.outcomes):
            if outcome.resumed is not None:
                break
            outcome.resumed = job.resumed
        if job.resumed not in (self._allowed or ()):
            self._complain(f"resumed at {job.resumed} instead of {self._allowed}")
        if self._allowed and job.resumed < max(self._allowed) and "is damaged (" not in job.text:
            self._complain("passed a checkpoint over without a warning")
        self._allowed = None

    def _complain(self, problem: str) -> None:
        (self.outcomes[-1].problems if self.outcomes else self.problems).append(problem)
