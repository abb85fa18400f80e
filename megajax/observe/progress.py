"""Progress of long jobs: a bar on a terminal, and log lines at intervals where there is no terminal."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, ProgressColumn, TextColumn, TimeRemainingColumn

log = logging.getLogger(__name__)

_LOG_SECONDS = 10.0
_BAR_SECONDS = 0.2


@contextmanager
def progress_bar(
    total: int, done: int, console: Console | None = None, counts: bool = True
) -> Iterator[Callable[[int, str], None]]:
    """Show how many of `total` steps are done, starting at `done`; show nothing in a file, a pipe or a notebook.

    Args:
        total: number of steps in all.
        done: number of steps done at the start.
        console: console on which the bar is drawn; None = standard output.
        counts: whether to show the number of steps and the time left beside the bar.

    Yields:
        `advance(step, note)`, which moves the bar to `step` and writes `note` beside it.
    """
    console = console or Console()
    if not console.is_terminal:
        yield lambda step, note: None
        return
    more: tuple[ProgressColumn, ...] = (MofNCompleteColumn(), TimeRemainingColumn()) if counts else ()
    columns = (BarColumn(), *more, TextColumn("{task.description}"))
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("", total=total, completed=done)
        yield lambda step, note: progress.update(task, completed=step, description=note)


class InputProgress:
    """Show the progress of a long job through its input, its rate and the time left, as a context manager.

    Args:
        total: size of the input in bytes.
        done: bytes that an earlier run has processed; they do not count for the rate.
    """

    def __init__(self, total: int, done: int = 0):
        console = Console(stderr=True)
        self._bar = progress_bar(max(total, 1), done, console, counts=False)
        self._logs, self._seconds = not console.is_terminal, _BAR_SECONDS if console.is_terminal else _LOG_SECONDS
        self._total, self._done, self._read, self._documents = total, done, 0, 0
        self._start = self._shown = time.monotonic()

    def advance(self, read: int, documents: int) -> None:
        """Count `read` more bytes of input and the documents in them."""
        self._read += read
        self._documents += documents
        now = time.monotonic()
        if now - self._shown >= self._seconds:
            self._shown = now
            self._move(self._done + self._read, str(self))
            if self._logs:
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
        self._move = self._bar.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.__exit__(kind, error, trace)
