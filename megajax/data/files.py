"""Files that appear under their name complete, or not at all."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO
from uuid import uuid4

from megajax.config.base import ConfigError


@contextmanager
def atomic_write(path: Path) -> Iterator[BinaryIO]:
    """Open `path` for writing under a temporary name beside it, and rename when the block ends without an error.

    Concurrent writers of the same path do not disturb each other: the last one to finish wins.
    """
    temporary = path.with_name(f".{path.name}.{uuid4().hex}")
    try:
        with temporary.open("xb", 1 << 20) as file:
            yield file
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def write_text(path: Path, text: str) -> None:
    """Write a text file that a user asked for.

    Raises:
        ConfigError: it cannot be written.
    """
    try:
        with atomic_write(path) as file:
            file.write(text.encode())
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}") from error
