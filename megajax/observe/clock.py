"""Where the time of a process goes: every second of it is booked to exactly one cause.

    clock = Clock()                     # first thing in a run: what follows is "start"
    with clock.during("restore"):
        ...
    clock.steady()                      # the first step is done: what nobody claims is "host" from now on

Causes of the training loop are "input" (waiting for a batch), "device" (waiting for a step to end) and "host" (the
rest: dispatching steps, reporting). "input" is an upper bound of what the devices miss, for they may still be at work
on the step before. Others are up to the caller: "compile", "restore", "evaluation", "checkpoint".
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

IN_STEPS = ("start", "input", "host", "device")
"""Causes that belong to the time per step, as in Megatron-LM's iteration time; the first step compiles in "start"."""


class Clock:
    """Seconds by cause; one per process."""

    def __init__(self, now: Callable[[], float] = time.perf_counter) -> None:
        self._now = now
        self._since = now()
        self._cause = "start"
        self._seconds: dict[str, float] = {}

    @contextmanager
    def during(self, cause: str) -> Iterator[None]:
        """Book what happens inside to `cause`, and to nothing around it."""
        before = self._switch(cause)
        try:
            yield
        finally:
            self._switch(before)

    def steady(self) -> None:
        """The start is over."""
        if self._cause == "start":
            self._switch("host")

    @property
    def seconds(self) -> dict[str, float]:
        """All that was booked until now; adds up to the age of the clock."""
        self._switch(self._cause)
        return dict(self._seconds)

    def _switch(self, cause: str) -> str:
        now = self._now()
        self._seconds[self._cause] = self._seconds.get(self._cause, 0.0) + now - self._since
        self._since, before, self._cause = now, self._cause, cause
        return before


class Meter:
    """Reads a clock again and again."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._before: dict[str, float] = {}

    def read(self) -> dict[str, float]:
        """Seconds by cause since the reading before; the first time, since the clock began."""
        before, self._before = self._before, self._clock.seconds
        return {cause: seconds - before.get(cause, 0.0) for cause, seconds in self._before.items()}
