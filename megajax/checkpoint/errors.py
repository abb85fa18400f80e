"""Which errors of a file system a user can mend; others are raised as they are: a restart may be all it takes."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager

from etils import epath

from megajax.config.base import ConfigError
from megajax.config.cli import MENDABLE


@contextmanager
def one_line(what: str, remedy: str) -> Iterator[None]:
    """Turn what is for the user to mend into one line that names what failed.

    Raises:
        ConfigError: no space, no permission, no such directory.
    """
    try:
        yield
    except ConfigError:
        raise
    except Exception as error:
        number = _number(error)
        if number not in MENDABLE:
            raise
        better = f"{MENDABLE[number]}; otherwise " if number in (errno.EMFILE, errno.ENFILE) else ""
        raise ConfigError(f"{what} failed ({reason(error)}): {better}{remedy}") from error


def check_reachable(directory: epath.Path) -> None:
    """Look for the directory, be it there or not.

    Raises:
        ConfigError: it is an object store's, whose package is not installed, or may not be looked at.
    """
    try:
        with one_line(f"opening {directory}", "choose another directory"):
            directory.exists()
    except ImportError as error:
        raise ConfigError(f"{directory}: {reason(error)}, or choose a local directory") from error


def reason(error: Exception) -> str:
    """An error in one line."""
    return " ".join(str(error).split())[-200:] or type(error).__name__  # what went wrong stands last


def _number(error: Exception) -> int:
    """The system's number of an error, by its text if need be: TensorStore and Orbax pass on no more than that."""
    if isinstance(error, OSError) and error.errno is not None:
        return error.errno
    return next((number for number in MENDABLE if os.strerror(number) in str(error)), 0)
