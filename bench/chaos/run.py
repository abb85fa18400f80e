"""One training run under the chaos test: its events, and the comparison with an undisturbed run."""

from __future__ import annotations

import random
import re
import shutil
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench.chaos.events import Event, damage
from bench.chaos.jobs import Disk, HangError, Job, Layout
from tests.runs import arrays, records

FINISH = "left alone"


@dataclass
class Outcome:
    """What happened to a run, and what came of it."""

    kind: str
    what: str = ""
    when: str = ""
    code: int | None = None
    seconds: float | None = None
    """From then on until the job's last process was gone."""
    resumed: int | None = None
    """The step at which the next start went on."""
    problems: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        code = "" if self.code is None else f"exit {self.code}"
        gone = "" if self.seconds is None else f"gone in {self.seconds:.1f} s"
        then = "" if self.resumed is None else f"resumed at {self.resumed}"
        words = [f"{self.what or self.kind:64}", f"{self.when:20}", f"{code:9}", f"{gone:14}", f"{then:15}"]
        return " ".join([*words, *self.problems]).rstrip()


@dataclass(frozen=True)
class Result:
    """What a run came to."""

    arrays: dict[str, bytes]
    records: list[dict[str, Any]]


class Run:
    """A run, from its first start to its finish."""

    def __init__(self, name: str, layout: Layout, scratch: Path, disk: Disk, words: Sequence[str]) -> None:
        self.layout, self.outcomes = layout, list[Outcome]()
        self.start_seconds = 0.0
        """What its longest start took, to the end of the first step."""
        self._disk, self._output, self._saves = disk, scratch / name, disk.path / name / "checkpoints"
        self._corpus = scratch / "numbers.jsonl"
        self._words = [*words, f"checkpoint.directory={self._saves}"]
        self._starts = 0
        self._allowed: set[int] | None = None

    @property
    def steps(self) -> list[int]:
        """Steps that a start may resume at, ascending; at 0 it begins."""
        names = {path.name for path in self._saves.glob("*") if path.name.isdigit()}
        return sorted(map(int, names | {"0"}))

    @property
    def damaged(self) -> bool:
        """Whether the newest checkpoint was damaged, and no start has come across it yet."""
        return self._allowed is not None

    def strike(self, event: Event) -> None:
        """Start, let it happen, and see how the job ends."""
        outcome = Outcome(event.kind, str(event), str(event.moment))
        with self._job(outcome, event) as job:
            struck = event.wait(job)
            with event.strike(job, self._disk) if struck else nullcontext():
                outcome.seconds = job.end()
            outcome.code = job.process.returncode
            if not struck:
                outcome.problems.append("had ended before")
            elif problem := "" if _finished(job) else event.problem(job, outcome.code, self.steps[-1]):
                outcome.problems.append(problem)

    def damage(self, rng: random.Random) -> None:
        """Damage the newest checkpoint."""
        *_, before, newest = self.steps
        what, is_fatal = damage(self._saves / str(newest), rng)
        self._allowed = {before} if is_fatal else {before, newest}
        self.outcomes.append(Outcome("damage", what, "between starts"))

    def finish(self, expected: Result | None = None) -> Result:
        """Start it, leave it alone until it is done, and compare it with an undisturbed run."""
        outcome, result = Outcome(FINISH), Result({}, [])
        with self._job(outcome) as job:
            job.wait_for_start()
            begin = time.monotonic()
            job.wait_for(lambda line: job.step > (job.resumed or 0) + 1)
            self.start_seconds = time.monotonic() - begin
            job.wait_for(lambda line: False)
            job.end()
            outcome.code = job.process.returncode
            if not _finished(job):
                outcome.problems.append("did not finish")
            else:
                found = arrays(self._saves.parent, self.steps[-1])
                result = Result({name: value.tobytes() for name, value in found.items()}, records(self._output))
                outcome.problems += _differences(result, expected or result)
                shutil.rmtree(self._saves.parent)  # to leave the others their room
        return result

    @contextmanager
    def _job(self, outcome: Outcome, event: Event | None = None) -> Iterator[Job]:
        """One start, whose `outcome` is noted."""
        allowed = self._allowed or {self.steps[-1]}
        job = Job(self.layout, self._corpus, self._output, self._words, event.fault if event else None)
        try:
            yield job
        except HangError:
            outcome.problems.append("HANG")
        except BaseException:
            job.kill()
            raise
        finally:
            self._starts += 1
            self._output.with_name(f"{self._output.name}.{self._starts}.log").write_text(job.text)
        if job.resumed is not None:
            outcome.problems += self._judge_resumption(job, allowed)
            self._allowed = None
        self.outcomes.append(outcome)

    def _judge_resumption(self, job: Job, allowed: set[int]) -> list[str]:
        """What is wrong with the step at which a start went on; it is noted with what happened since the last one."""
        for outcome in reversed(self.outcomes):
            if outcome.resumed is not None:
                break
            outcome.resumed = job.resumed
        if job.resumed not in allowed:
            return [f"resumed at {job.resumed} instead of {' or '.join(map(str, allowed))}"]
        if job.resumed < max(allowed) and "is damaged (" not in job.text:
            return ["passed a checkpoint over without a warning"]
        return []


def _differences(found: Result, expected: Result) -> list[str]:
    names = found.arrays.keys() | expected.arrays.keys()
    problems = [f"{name} differs" for name in names if found.arrays.get(name) != expected.arrays.get(name)]
    if found.records != expected.records:
        less = [line for line in expected.records if line not in found.records]
        more = [line for line in found.records if line not in expected.records]
        problems.append(f"metrics.jsonl differs: lacks {less[:2]}, has {more[:2]}")
    return problems


def _finished(job: Job) -> bool:
    """Whether its run is complete."""
    return job.process.returncode == 0 and re.search(r"finished (its )?\d+ steps", job.text) is not None
