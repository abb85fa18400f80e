"""Writing of files that appear under their name complete or not at all, and locks that one process at a time holds."""

from __future__ import annotations

import fcntl
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any, BinaryIO
from uuid import uuid4

from megajax.config.base import InputError


@contextmanager
def atomic_write(path: Path, *, durable: bool = True) -> Iterator[BinaryIO]:
    """Open `path` for writing under a temporary name beside it, and rename when the block ends without an error.

    Concurrent writers of the same path do not disturb each other: the last one to finish wins.

    Args:
        path: name that the file gets.
        durable: true to wait until the file is on the disk, so that it outlives a power failure the next moment.
            Without it the older file may come back then.
    """
    temporary = path
    try:
        while True:
            temporary = path.with_name(f".{path.name}.{uuid4().hex}")
            file = temporary.open("xb", 1 << 20)
            try:
                _hold(file)
            except BlockingIOError:  # taken for a leftover, which is about to be removed
                file.close()
                continue
            except OSError:  # a file system without locks
                pass
            if temporary.exists():
                break
            file.close()  # removed as a leftover before it was locked
        with file:
            yield file
            file.flush()
            if durable:
                os.fsync(file.fileno())
        temporary.replace(path)
        if durable:
            _sync_folder(path.parent)
    except BaseException:
        if temporary != path:
            temporary.unlink(missing_ok=True)
        raise


def remove_leftovers(*paths: Path) -> None:
    """Remove temporary files that killed writers of these paths left, all in one folder; files being written stay."""
    names = "|".join(re.escape(path.name) for path in paths)
    for entry in paths[0].parent.iterdir():
        if not re.fullmatch(rf"\.({names})\.[0-9a-f]{{32}}", entry.name):
            continue
        with suppress(OSError), entry.open("rb") as file:  # somebody else may have been quicker
            _hold(file)
            entry.unlink()


@contextmanager
def held_alone(path: Path, busy: Exception) -> Iterator[None]:
    """Hold a lock file, which the system releases when this process ends, however it ends.

    Raises:
        OSError: the file cannot be written, or the file system has no locks.
        Exception: `busy`, where another process holds it.
    """
    with path.open("w") as file:
        try:
            _hold(file)
        except BlockingIOError:
            raise busy from None
        yield


def _hold(file: IO[Any]) -> None:
    """Hold a file until it is closed.

    Raises:
        BlockingIOError: another process holds it.
        OSError: the file system has no locks.
    """
    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


def _sync_folder(folder: Path) -> None:
    """Write the names in a folder to the disk, where the file system can do that."""
    with suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def write_text(path: Path, text: str) -> None:
    """Write a text file that a user asked for.

    Raises:
        InputError: the file cannot be written.
    """
    try:
        with atomic_write(path) as file:
            file.write(text.encode())
    except OSError as error:
        raise InputError(f"cannot write {path}: {error.strerror}") from error
