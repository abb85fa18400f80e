"""Requests to a running job: SIGTERM, Ctrl-C and a time limit ask it to save and leave, SIGUSR1 to save and go on."""

from __future__ import annotations

import signal
import time
from enum import IntEnum
from types import FrameType, TracebackType
from typing import Any, Self


class Request(IntEnum):
    """What is asked for; of several the largest counts, so that processes agree by the maximum of theirs."""

    NOTHING = 0
    SIGUSR1 = 1
    TIME_LIMIT = 2
    SIGTERM = 3
    SIGINT = 4

    @property
    def stops(self) -> bool:
        """Whether the run is to end."""
        return self >= Request.TIME_LIMIT

    def __str__(self) -> str:
        return "train.exit_duration" if self is Request.TIME_LIMIT else self.name


class Requests:
    """Context in which the three signals only leave a note; a second Ctrl-C leaves at once."""

    def __init__(self, minutes: float | None) -> None:
        """Nothing is requested yet; the time limit counts from here."""
        self._noted = Request.NOTHING
        self._limit = None if minutes is None else time.monotonic() + 60 * minutes
        self._previous: dict[signal.Signals, Any] = {}

    def take(self) -> Request:
        """What this process was asked for; a request to save is noted once, one to stop stays."""
        if self._limit is not None and time.monotonic() >= self._limit:
            self._noted = max(self._noted, Request.TIME_LIMIT)
        taken = self._noted
        if not taken.stops:
            self._noted = Request.NOTHING
        return taken

    def __enter__(self) -> Self:
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
            self._previous[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self._noted is Request.SIGINT and number == signal.SIGINT:
            raise KeyboardInterrupt
        self._noted = max(self._noted, Request[signal.Signals(number).name])
