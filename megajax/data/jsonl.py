"""Documents out of JSON Lines files.

Lines end at LF and nowhere else: U+2028 and other line separators may stand inside a JSON string. A byte-order mark,
CR before LF, blank lines and a missing last LF are all fine; `.gz` files are unpacked on the way.
"""

from __future__ import annotations

import codecs
import gzip
import io
import json
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from rich.console import Console
from rich.progress import Progress

from megajax.config.base import ConfigError


class Line(NamedTuple):
    """One line that is not blank, and where it stands."""

    path: Path
    number: int
    content: bytes

    @property
    def where(self) -> str:
        """Place of the line, for messages."""
        return f"{self.path}:{self.number}"


def read_lines(paths: Iterable[str | Path]) -> Iterator[Line]:
    """Iterate over the lines of some files; on a terminal a bar shows how far through the bytes it is."""
    console = Console(stderr=True)
    with Progress(console=console, disable=not console.is_terminal, transient=True) as progress:
        for path in map(Path, paths):
            try:
                with progress.open(path, "rb", description=path.name) as raw:
                    # the bar costs something per read: make them large
                    file = io.BufferedReader(raw, 1 << 20)  # type: ignore[type-var]
                    unpacked = gzip.GzipFile(fileobj=file) if path.suffix == ".gz" else file
                    for number, line in enumerate(unpacked, 1):
                        content = (line.removeprefix(codecs.BOM_UTF8) if number == 1 else line).strip()
                        if content:
                            yield Line(path, number, content)
            except (OSError, EOFError, zlib.error) as error:
                raise ConfigError(f"{path}: cannot be read ({error})") from None


def parse_document(line: Line, key: str) -> str:
    """Return the text that a line holds under `key`.

    Raises:
        ConfigError: why the line is not a record with a text there.
    """
    try:
        record = json.loads(line.content.decode())
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"not JSON ({error})") from None
    if not isinstance(record, dict):
        raise ConfigError(f"not a JSON record but a {type(record).__name__}")
    if key not in record:
        raise ConfigError(f'no key "{key}" (the record has: {", ".join(record) or "none"})')
    text = record[key]
    if not isinstance(text, str):
        raise ConfigError(f'key "{key}" holds no text but {json.dumps(text)[:40]}')
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ConfigError(f'key "{key}" holds half a surrogate pair at character {error.start}') from None
    return text


def read_documents(paths: Iterable[str | Path], key: str = "text") -> Iterator[str]:
    """Iterate over the texts of some files.

    Raises:
        ConfigError: a file cannot be read or a line is no usable record.
    """
    for line in read_lines(paths):
        try:
            yield parse_document(line, key)
        except ConfigError as error:
            raise ConfigError(f"{line.where}: {error}") from None
