"""Times of steps, singly and in percentiles, and the processes that are slower than the others.

Collectives make all processes equally slow, so the time of a step does not tell which one is the cause. The time that a
host spends before it waits for its device does: on input, and on its other work. (A slow GPU is not found: all
processes wait for it.)

Shapes: P processes, 2 columns: input, host.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import numpy as np

from megajax.observe.goodput import IN_STEPS, Clock, Meter

PERCENTILES = {"p50": 50, "p90": 90, "p99": 99, "max": 100}
REMEMBERED = 10_000
"""Number of newest steps over which percentiles are taken."""
ENOUGH = 10
"""Number of steps before any process is called slow; over fewer, a single wait is a large part of the time."""
COLUMNS = ("input", "host")
SLOW = 1.5
"""Factor of the median time above which a process is a straggler (see `NOTICEABLE`)."""
NOTICEABLE = 0.05
"""Fraction of the steps' time by which a straggler must also exceed the median."""


class Pace:
    """Take the times of the steps of one process."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._laps, self._own = Meter(clock), Meter(clock)
        self._times: deque[float] = deque(maxlen=REMEMBERED)
        self._first = True
        self._unjudged, self._wall = 0, 0.0
        self._table: np.ndarray | float = 0.0

    def start(self) -> None:
        """Begin the next lap."""
        self._laps.read()

    def lap(self) -> tuple[float, float]:
        """End a step and return its seconds, and how many of them were spent waiting for a batch."""
        self._clock.steady()
        spent = self._laps.read()
        seconds = sum(spent.get(cause, 0.0) for cause in IN_STEPS)
        if self._first:  # the first step compiles, and waits for the loader to start
            self._first = False
            self._own.read()
        else:
            self._times.append(seconds)
            self._unjudged += 1
            self._wall += seconds
        return seconds, spent.get("input", 0.0)

    def own_seconds(self) -> list[float]:
        """Return this process's row of the table for `hosts`: the seconds spent since the last call, by `COLUMNS`."""
        spent = self._own.read()
        return [0.0 if self._first else spent.get(column, 0.0) for column in COLUMNS]

    def hosts(self, table: np.ndarray, names: Sequence[str]) -> str | None:
        """Describe the processes that are slower than the others, if any, over at least `ENOUGH` steps
        (`describe_hosts`).

        Args:
            table: seconds of all processes since the last call, [P, 2]; added to those of later calls while the steps
                are too few.
            names: host of every process.
        """
        self._table = self._table + table
        if self._unjudged < ENOUGH:
            return None
        seconds, wall = self._table, self._wall
        self._table, self._unjudged, self._wall = 0.0, 0, 0.0
        return describe_hosts(seconds, wall, names)

    def percentiles(self, last: int = REMEMBERED) -> dict[str, float]:
        """Return median, 90th and 99th percentile and maximum of the last steps in seconds; nothing before step 2."""
        times = list(self._times)[-last:]
        if not times:
            return {}
        return dict(zip(PERCENTILES, map(float, np.percentile(times, list(PERCENTILES.values()))), strict=True))

    def describe(self) -> str:
        """Return the percentiles as one line."""
        values = ", ".join(f"{name} {seconds * 1e3:.1f} ms" for name, seconds in self.percentiles().items())
        return f"step time of the last {len(self._times)} steps: {values or 'n/a'}"


def find_stragglers(seconds: np.ndarray, wall: float) -> list[int]:
    """Return the numbers of the processes that were slower than the others.

    Args:
        seconds: seconds that each process spent, [P].
        wall: seconds that the same steps took.
    """
    median = _median(seconds)
    return [int(p) for p in np.flatnonzero((seconds > SLOW * median) & (seconds > median + NOTICEABLE * wall))]


def describe_hosts(table: np.ndarray, wall: float, names: Sequence[str]) -> str | None:
    """Return a table of the seconds that processes spent, and which are slow, or None if none is.

    Args:
        table: seconds by process and column, [P, 2].
        wall: seconds that the same steps took.
        names: host of every process.
    """
    rows, slow = [], []
    for column, seconds in zip(COLUMNS, table.T, strict=True):
        median = _median(seconds)
        rows.append(f"    {column:.<16}: ({seconds.min():.3f}, {median:.3f}, {seconds.max():.3f})")
        slow += [
            f"slow: process {process} ({names[process]}), {column} {seconds[process]:.3f} s (median {median:.3f} s)"
            for process in find_stragglers(seconds, wall)
        ]
    title = f"(min, median, max) over {len(table)} processes, seconds in {wall:.1f} s of steps:"
    return "\n".join([title, *rows, *slow]) if slow else None


def _median(seconds: np.ndarray) -> float:
    # The lower median, so that the slower one of two processes can be found.
    return float(np.sort(seconds)[(len(seconds) - 1) // 2])
