"""The progress bar is for terminals only."""

import logging
from io import StringIO

from rich.console import Console

from megajax.observe.progress import InputProgress, progress_bar


def test_draws_on_a_terminal():
    screen = StringIO()
    with progress_bar(10, 4, Console(file=screen, force_terminal=True, width=80)) as advance:
        advance(7, "loss 3.210")
    assert "7/10" in screen.getvalue() and "loss 3.210" in screen.getvalue()


def test_is_silent_in_a_file():
    file = StringIO()
    with progress_bar(10, 0, Console(file=file)) as advance:
        advance(7, "loss 3.210")
    assert file.getvalue() == ""


def test_progress_tells_rate_and_time_left(caplog, monkeypatch):
    """Four of ten megabytes were there before; two more in a second leave two seconds."""
    caplog.set_level(logging.INFO)
    clock = [100.0]
    monkeypatch.setattr("time.monotonic", lambda: clock[0])
    with InputProgress(10_000_000, done=4_000_000) as progress:
        clock[0] = 101.0
        progress.advance(2_000_000, documents=300)
        assert str(progress) == "60%, 300 documents (300/s, 2.0 MB/s), 0:00:02 left"
        assert not caplog.messages
        clock[0] = 110.0
        progress.advance(3_000_000, documents=200)
    assert caplog.messages == ["90%, 500 documents (50/s, 0.5 MB/s), 0:00:02 left"]
