"""Stragglers: which processes are slower than the others at what each does for itself.

Collectives make all processes equally slow, so the time of a step names no culprit. What a host spends before it waits
for its device does: on input, and on everything else it has to do. (A slow GPU stays hidden in the wait of all.)

Shapes: P processes, 2 columns: input, host.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

COLUMNS = ("input", "host")
SLOW = 1.5
"""Times the median that a straggler takes,"""
NOTICEABLE = 0.05
"""if that is also more by this fraction of the time of the steps."""


def find_stragglers(seconds: np.ndarray, wall: float) -> list[int]:
    """Processes that were slower than the others.

    Args:
        seconds: What each spent, [P].
        wall: Seconds that the steps took in which they spent it.
    """
    median = _median(seconds)
    return [int(p) for p in np.flatnonzero((seconds > SLOW * median) & (seconds > median + NOTICEABLE * wall))]


def describe_hosts(table: np.ndarray, wall: float, names: Sequence[str]) -> str | None:
    """Table of what processes spent, and who is slow; None if nobody is.

    Args:
        table: Seconds by process and column, [P, 2].
        wall: Seconds that the steps took in which they spent them.
        names: Host of every process.
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
    # The lower one, so that of two processes the slower can be told.
    return float(np.sort(seconds)[(len(seconds) - 1) // 2])
