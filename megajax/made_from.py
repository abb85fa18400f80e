"""Records of the files from which something was derived, so that the result is not used once they have changed.

Token files have a record of their text, a copied or trained tokenizer has one of its files or text, and imported
weights have one of their model. The record holds a hash of the contents of each source, and the options that shaped the
result. Names are recorded for messages and do not count: a file that was moved is the same source, and another file
under its name is another source. A source whose size, times and inode are those of the record is not read again.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megajax.config.base import InputError
from megajax.files import atomic_write

log = logging.getLogger(__name__)

Source = dict[str, Any]
"""State of a source: path, size, mtime_ns, ctime_ns, inode, and blake2b of the contents, which is None if the file is
gone.

The list `also` has the paths that it had before: config.yaml, which is not written again, still names the source by one
of them.
"""

_LARGE = 1 << 32
"""Size in bytes from which a file takes some seconds to read."""


@dataclass(frozen=True)
class MadeFrom:
    """The sources and options from which something is derived."""

    sources: Sequence[str | Path]
    """Paths of the source files, in their order."""
    options: Mapping[str, Any]
    """Options on which the result depends besides, as JSON has them."""

    def difference(self, record: Path) -> str | None:
        """Describe how these sources and options differ from the recorded ones.

        The result is "" if they do not differ, and None if there is no record.

        A source that is gone does not count as different if the record has it under this path, now or before.
        """
        recorded = _read(record)
        if recorded is None:
            return None
        old_sources, old_options = recorded
        options = json.loads(json.dumps(dict(self.options)))
        for key in options.keys() | old_options.keys():
            old, now = old_options.get(key), options.get(key)
            if old != now:
                return f"its {key} is another one" if isinstance(now, dict) else f"its {key} was {old}, now it is {now}"
        if len(old_sources) != len(self.sources):
            return f"it was made from {_names(old['path'] for old in old_sources)}, now from {_names(self.sources)}"
        now = [_look(path, old) for path, old in zip(self.sources, old_sources, strict=True)]
        for path, before, after in zip(self.sources, old_sources, now, strict=True):
            names = {before["path"], *before.get("also", ())}
            if before["blake2b"] == after["blake2b"]:
                if also := sorted(names - {after["path"]}):
                    after["also"] = also
                continue
            if after["path"] not in names:
                return f"it was made from {before['path']}, now {path} is named"
            if after["blake2b"] is not None:
                return f"{path} has changed"
            log.info("%s is gone: what was made from it is used", path)
        if now != old_sources and all(source["blake2b"] for source in now):
            with suppress(OSError):
                _write(record, {"sources": now, "options": options})  # moved or touched: it need not be read next time
        return ""

    def make(self, record: Path, make: Callable[[], object]) -> None:
        """Make the thing, then record its sources as they were before it was made."""
        record.unlink(missing_ok=True)
        before = [_look(path, None) for path in self.sources]
        make()
        _write(record, {"sources": before, "options": dict(self.options)})

    def ensure(self, what: str, record: Path, make: Callable[[], object], *, there: bool, trained: str) -> bool:
        """Make the thing unless it is there and was made from these sources, and tell whether it was made.

        Args:
            what: name of the thing, for messages.
            record: path of the record of its sources.
            make: function that makes it and replaces an older one.
            there: whether the thing exists already.
            trained: name of the run that was trained on it; "" for none yet.

        Raises:
            InputError: a run was trained on it, and the sources named now are others.
        """
        problem = self.difference(record)
        if there and problem is None and trained:
            log.info("%s: taken as it is; from now on %s counts as what it was made from", what, _names(self.sources))
            with suppress(OSError):
                self.make(record, lambda: None)
            return False
        if there and problem == "":
            return False
        if problem and trained:
            raise InputError(
                f"{what}: {problem}, and {trained} was trained on it: restore that, or choose another output_dir"
            )
        if there:
            log.info("%s is made again: %s", what, problem or "nothing says what it was made from")
        self.make(record, make)
        return True


def sources_in(record: Path) -> list[str] | None:
    """List the paths of the sources that a record names, or return None if there is no record."""
    recorded = _read(record)
    return recorded and [source["path"] for source in recorded[0]]


def _read(record: Path) -> tuple[list[Source], dict[str, Any]] | None:
    try:
        content = json.loads(record.read_text(encoding="utf-8"))
        return content["sources"], content["options"]
    except (OSError, ValueError, LookupError, TypeError):
        return None


def _look(path: str | Path, known: Source | None) -> Source:
    """Describe a source as it is now; its contents are read only if it seems to differ from the known one."""
    folder, name = os.path.split(path)
    place = str(Path(os.path.realpath(folder), name))  # a link itself is a name: a hub's cache gives files such names
    try:
        status = Path(place).stat()
        seen = {
            "path": place, "size": status.st_size, "mtime_ns": status.st_mtime_ns, "ctime_ns": status.st_ctime_ns,
            "inode": status.st_ino,
        }  # fmt: skip
        if known is not None and seen == {key: known.get(key) for key in seen}:
            return known
        if status.st_size >= _LARGE:
            log.info("%s is read, to know its contents again: %.1f GiB", path, status.st_size / 2**30)
        with Path(place).open("rb") as file:
            digest = hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16)).hexdigest()
        return {**seen, "blake2b": digest}
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
        return {"path": place, "blake2b": None}


def _write(record: Path, content: Any) -> None:
    record.parent.mkdir(parents=True, exist_ok=True)
    with atomic_write(record) as file:
        file.write((json.dumps(content, indent=1) + "\n").encode())


def _names(paths: Any) -> str:
    names = [str(path) for path in paths]
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "") or "nothing"
