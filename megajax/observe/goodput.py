"""Goodput: every second of a process is booked to one cause, and the seconds are added up over all starts of a run.

    clock = Clock()                     # first thing in a run: what follows is "start"
    with clock.during("restore"):
        ...
    clock.steady()                      # the first step is done: what nobody claims is "host" from now on

Causes of the training loop are "input" (waiting for a batch), "device" (waiting for a step to end) and "host" (the
rest: dispatching steps, reporting). "input" is an upper bound of the devices' idle time, because they may still be at
work on the step before. The caller names the other causes: "compile", "restore", "evaluation", "checkpoint".

Goodput is the share of a run's whole life, over all its starts, that went into steps that count:

    goodput 91.2 % of 3 h 12 min in 2 starts: down 4.1 %, start 3.0 %, lost 1.2 %, checkpoint 0.3 %, input 0.2 %

"lost" is the time of steps that had to be done again after a crash or a return to a checkpoint; "down" is the time from
the last sign of life of a start to the next start. OUTPUT_DIR/goodput.json holds one record a start. It is replaced as
a whole, at most once a second: a process killed at any moment leaves a whole file, and the time that it had not written
counts as "down".
"""

from __future__ import annotations

import json
import logging
import math
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path

from megajax.files import atomic_write, remove_leftovers

log = logging.getLogger(__name__)

IN_STEPS = ("start", "input", "host", "device")
"""Causes that count in the time per step, as in Megatron-LM's iteration time; the first step compiles in "start"."""
STEPPING = ("host", "device")
"""Causes of the clock that are productive unless the steps are lost."""


class Clock:
    """Count the seconds of a process by cause."""

    def __init__(self, now: Callable[[], float] = time.perf_counter) -> None:
        self._now = now
        self._since = now()
        self._cause = "start"
        self._seconds: dict[str, float] = {}

    @contextmanager
    def during(self, cause: str) -> Iterator[None]:
        """Book the seconds of the block to `cause` alone, even inside another block."""
        before = self._switch(cause)
        try:
            yield
        finally:
            self._switch(before)

    def steady(self) -> None:
        """Note that the start is over: seconds without a cause count as "host" from now on."""
        if self._cause == "start":
            self._switch("host")

    @property
    def seconds(self) -> dict[str, float]:
        """Return all seconds until now by cause; they add up to the age of the clock."""
        self._switch(self._cause)
        return dict(self._seconds)

    def _switch(self, cause: str) -> str:
        now = self._now()
        self._seconds[self._cause] = self._seconds.get(self._cause, 0.0) + now - self._since
        self._since, before, self._cause = now, self._cause, cause
        return before


class Meter:
    """Read a clock repeatedly, each time from the last reading on."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._before: dict[str, float] = {}

    def read(self) -> dict[str, float]:
        """Return the seconds by cause since the last reading, at first since the clock began."""
        before, self._before = self._before, self._clock.seconds
        return {cause: seconds - before.get(cause, 0.0) for cause, seconds in self._before.items()}


@dataclass(kw_only=True)
class Start:
    """One start of a run, or its continuation after a return to a checkpoint."""

    began: float
    """Unix time of the start."""
    resumed: int
    """Number of steps that had been done before."""
    step: int
    """Number of the last step that was done."""
    seconds: dict[str, float] = field(default_factory=dict)
    """Seconds of the clock by cause, until the last sign of life."""


def spending(starts: Sequence[Start]) -> dict[str, float]:
    """Add up the seconds of a run by cause, with "productive", "lost" and "down"; together they are the life of the
    run.

    All steps of one start are taken as equally long.
    """
    total: dict[str, float] = defaultdict(float, productive=0.0)
    redone_after, next_began = math.inf, -math.inf
    for start in reversed(starts):
        stepping = sum(start.seconds.get(cause, 0.0) for cause in STEPPING)
        done = start.step - start.resumed
        kept = max(min(start.step, redone_after) - start.resumed, 0)
        productive = stepping * kept / done if done else 0.0
        total["productive"] += productive
        total["lost"] += stepping - productive
        total["down"] += max(next_began - start.began - sum(start.seconds.values()), 0.0)
        for cause in start.seconds.keys() - set(STEPPING):
            total[cause] += start.seconds[cause]
        redone_after, next_began = min(redone_after, start.resumed), start.began
    return dict(total)


def goodput(starts: Sequence[Start]) -> float:
    """Return the productive fraction of a run's life, between 0 and 1."""
    seconds = spending(starts)
    # Times of day have digits to spare for a microsecond or so: what a rounding leaves must not exceed the whole.
    return min(1.0, max(0.0, seconds["productive"] / (sum(seconds.values()) or 1.0)))


def describe_goodput(starts: Sequence[Start]) -> str:
    """Return one line that tells the goodput and the causes of the rest, largest first."""
    seconds = spending(starts)
    whole = sum(seconds.values())
    shares = {cause: 100 * spent / (whole or 1.0) for cause, spent in seconds.items()}
    good = shares.pop("productive")
    causes = [
        f"{cause} {share:.1f} %" for cause, share in sorted(shares.items(), key=lambda item: -item[1]) if share >= 0.05
    ]
    count = f" in {len(starts)} starts" if len(starts) > 1 else ""
    return f"goodput {good:.1f} % of {_duration(whole)}{count}{': ' if causes else ''}{', '.join(causes)}"


class Ledger:
    """Keep the starts of a run in a file, the running one last; only one process does so."""

    def __init__(self, path: Path, clock: Clock, resumed: int) -> None:
        """Go on with the starts found in `path`; the present start has been running since `clock` began."""
        self._path = path
        self._meter = Meter(clock)
        self._written = -math.inf
        remove_leftovers(path)
        self.starts = _load(path)
        self._begin(resumed, time.time() - sum(clock.seconds.values()))

    def rewind(self, step: int) -> None:
        """Note that the run has returned to the checkpoint of `step`."""
        self.save()
        self._begin(step, time.time())

    def done(self, step: int) -> None:
        """Note that a step has ended."""
        self.starts[-1].step = step
        if time.monotonic() - self._written > 1:
            self.save()

    def save(self) -> None:
        """Write the file, with the time until now."""
        seconds = self.starts[-1].seconds
        for cause, spent in self._meter.read().items():
            seconds[cause] = seconds.get(cause, 0.0) + spent
        whole = {"goodput": goodput(self.starts), "seconds": spending(self.starts)}
        text = json.dumps(whole | {"starts": [asdict(start) for start in self.starts]}, indent=1)
        with atomic_write(self._path, durable=False) as file:  # written every second, so it does not wait for the disk
            file.write(text.encode())
        self._written = time.monotonic()

    def _begin(self, resumed: int, began: float) -> None:
        self.starts.append(Start(began=began, resumed=resumed, step=resumed))
        self.save()


def _load(path: Path) -> list[Start]:
    if not path.exists():
        return []
    try:
        return [Start(**start) for start in json.loads(path.read_text(encoding="utf-8"))["starts"]]
    except (ValueError, KeyError, TypeError):
        log.warning("%s is damaged: goodput counts from this start on", path)
        return []


def _duration(seconds: float) -> str:
    minutes = int(seconds // 60)
    if minutes >= 60:
        return f"{minutes // 60} h {minutes % 60} min"
    return f"{minutes} min {seconds % 60:.0f} s" if minutes else f"{seconds:.1f} s"
