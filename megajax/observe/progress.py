"""A progress bar for people: drawn on a terminal, silent in a file, a pipe or a notebook."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn


@contextmanager
def progress_bar(total: int, done: int, console: Console | None = None) -> Iterator[Callable[[int, str], None]]:
    """Show how many of `total` steps are done, starting at `done`.

    Yields:
        `advance(step, note)`: move the bar to `step` and write `note` beside it.
    """
    console = console or Console()
    if not console.is_terminal:
        yield lambda step, note: None
        return
    columns = (BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(), TextColumn("{task.description}"))
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("", total=total, completed=done)
        yield lambda step, note: progress.update(task, completed=step, description=note)
