"""The progress bar is for terminals only."""

from io import StringIO

from rich.console import Console

from megajax.observe.progress import progress_bar


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
