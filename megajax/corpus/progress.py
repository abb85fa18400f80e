"""How far through its input a long job is, at what rate, and when it will be done."""

from __future__ import annotations

import logging
import time
from datetime import timedelta
from types import TracebackType
from typing import Self

from rich import progress
from rich.console import Console

log = logging.getLogger(__name__)

_LOG_SECONDS = 10.0
_BAR_SECONDS = 0.2


class Progress:
    """A bar on a terminal, a log line now and then elsewhere; use it as a context manager.

    Args:
        total: bytes of input.
        done: of them, what an earlier run has dealt with; it does not count for the rate.
    """

    def __init__(self, total: int, done: int = 0):
        console = Console(stderr=True)
        columns = progress.BarColumn(), progress.TextColumn("{task.description}")
        self._bar = progress.Progress(*columns, console=console, disable=not console.is_terminal, transient=True)
        self._task = self._bar.add_task("", total=max(total, 1), completed=done)
        self._seconds = _BAR_SECONDS if console.is_terminal else _LOG_SECONDS
        self._total, self._done, self._read, self._documents = total, done, 0, 0
        self._start = self._shown = time.monotonic()

    def advance(self, read: int, documents: int) -> None:
        """Count some more bytes of input and the documents in them."""
        self._read += read
        self._documents += documents
        now = time.monotonic()
        if now - self._shown >= self._seconds:
            self._shown = now
            self._bar.update(self._task, completed=self._done + self._read, description=str(self))
            if self._bar.disable:
                log.info("%s", self)

    def __str__(self) -> str:
        seconds = max(time.monotonic() - self._start, 1e-9)
        done = self._done + self._read
        left = timedelta(seconds=round((self._total - done) * seconds / max(self._read, 1)))
        return (
            f"{done / max(self._total, 1):.0%}, {self._documents:,} documents "
            f"({self._documents / seconds:,.0f}/s, {self._read / seconds / 1e6:,.1f} MB/s), {left} left"
        )

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()
