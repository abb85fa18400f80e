"""Stopping politely: SIGTERM and Ctrl-C ask the loop to save and leave; a second Ctrl-C leaves at once."""

from __future__ import annotations

import signal
from types import FrameType, TracebackType
from typing import Any, Self


class StopRequest:
    """Context in which the two signals only set `requested`."""

    def __init__(self) -> None:
        """Nothing is requested yet."""
        self.requested: str | None = None
        self._previous: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Self:
        for number in (signal.SIGTERM, signal.SIGINT):
            self._previous[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.requested and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.requested = signal.Signals(number).name
