"""Errors of a file system that a user can mend, each said once in one line.

Other errors are raised as they are: a restart may be all it takes. `Checkpoints` raises the error of a save that fails,
and Orbax's threads print no tracebacks of their own.
"""

from __future__ import annotations

import errno
import logging
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import cache

from etils import epath

from megajax.config.base import InputError
from megajax.config.cli import MENDABLE

PASSING = {
    errno.EIO, errno.ESTALE, errno.ETIMEDOUT, errno.EAGAIN, errno.EINTR, errno.EBUSY, errno.ENOMEM, errno.EMFILE,
    errno.ENFILE, errno.EREMOTEIO, errno.ECONNRESET, errno.ECONNABORTED, errno.ENETDOWN, errno.ENETUNREACH,
    errno.EHOSTDOWN, errno.EHOSTUNREACH, errno.ENOTCONN, errno.ESHUTDOWN, errno.EACCES, errno.EPERM,
}  # fmt: skip
"""Numbers of errors that say nothing about the contents of a file: disk, network or this process could not read them
just now."""


@contextmanager
def one_line(what: str, remedy: str, room: Callable[[], str] = str) -> Iterator[None]:
    """Turn an error that the user can mend into one line that names what failed.

    Args:
        what: action that may fail, such as "saving a checkpoint to DIR".
        remedy: advice on what the user can do.
        room: function that says how much space is needed and how much there is; it is called where there is too little.

    Raises:
        InputError: there is no space, no permission or no such directory.
    """
    try:
        yield
    except InputError:
        raise
    except Exception as error:
        number = _number(error, MENDABLE)
        if number not in MENDABLE:
            raise
        better = f"{MENDABLE[number]}; otherwise " if number in (errno.EMFILE, errno.ENFILE) else ""
        need = room() if number in (errno.ENOSPC, errno.EDQUOT) else ""
        raise InputError(f"{what} failed ({reason(error)}{need and f'; {need}'}): {better}{remedy}") from error


def may_pass(error: Exception) -> bool:
    """Tell whether an error of reading says nothing about the contents of what was to be read."""
    return _number(error, PASSING) in PASSING


def check_reachable(directory: epath.Path) -> None:
    """Make sure that a directory can be looked at, whether it exists or not.

    Raises:
        InputError: the directory is an object store's, whose package is not installed, or may not be looked at.
    """
    try:
        with one_line(f"opening {directory}", "choose another directory"):
            directory.exists()
    except ImportError as error:
        raise InputError(f"{directory}: {reason(error)}, or choose a local directory") from error


def reason(error: Exception) -> str:
    """Return the text of an error in one line."""
    return " ".join(str(error).split())[-200:] or type(error).__name__  # what went wrong stands last


def _number(error: Exception, known: Iterable[int]) -> int:
    """Return the system's number of an error, found in its text where TensorStore or Orbax pass on no more; else 0."""
    if isinstance(error, OSError) and error.errno is not None:
        return error.errno
    return next((number for number in known if os.strerror(number) in str(error)), 0)


@cache
def quiet_orbax() -> None:
    """Silence what Orbax and TensorStore print about errors that they also raise; done once per process."""
    for name in ("absl", "asyncio"):
        logging.getLogger(name).setLevel(logging.CRITICAL)
    others = sys.unraisablehook

    def hook(problem: sys.UnraisableHookArgs) -> None:
        # TensorStore answers writes that were in flight after Orbax has closed the event loop they belonged to.
        if str(problem.exc_value) != "Event loop is closed":
            others(problem)

    sys.unraisablehook = hook
