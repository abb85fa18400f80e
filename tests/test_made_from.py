"""Derived files know their source by its contents, whatever its name and place."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from megajax.config import InputError
from megajax.made_from import MadeFrom, sources_in


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "a.txt"
    path.write_text("one")
    return path


def derive(text: Path, options: dict[str, object] | None = None, *, trained: str = "") -> tuple[str, bool]:
    """The upper-case copy of a text, and whether it was made now."""
    made = text.with_name("made")
    recipe = MadeFrom([text], options or {"case": "upper"})
    now = recipe.ensure(
        "the copy", made.with_name("made.json"), lambda: made.write_text(text.read_text().upper()),
        there=made.exists(), trained=trained,
    )  # fmt: skip
    return made.read_text(), now


def test_made_once_and_again_when_the_source_changes(text: Path) -> None:
    assert derive(text) == ("ONE", True)
    assert derive(text) == ("ONE", False)
    text.write_text("two")
    assert derive(text) == ("TWO", True)
    assert derive(text, {"case": "UPPER"}) == ("TWO", True)
    assert derive(text, {"case": "UPPER"}) == ("TWO", False)


def test_same_size_and_time_do_not_deceive(text: Path) -> None:
    """As `cp -p` and `touch -r` leave them: the inode's own time tells."""
    derive(text)
    before = text.stat()
    text.write_text("two")
    os.utime(text, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert derive(text) == ("TWO", True)


def test_a_source_that_is_as_it_was_is_not_read_again(text: Path) -> None:
    """A wrong hash in the record goes unnoticed until the file is touched."""
    derive(text)
    record = text.with_name("made.json")
    content = json.loads(record.read_text())
    content["sources"][0]["blake2b"] = "0"
    record.write_text(json.dumps(content))
    assert MadeFrom([text], {"case": "upper"}).difference(record) == ""
    os.utime(text)
    assert MadeFrom([text], {"case": "upper"}).difference(record) == f"{text} has changed"


def test_names_do_not_count(text: Path) -> None:
    derive(text)
    other = text.rename(text.with_name("b.txt"))
    assert derive(other, trained="the run") == ("ONE", False)
    assert sources_in(text.with_name("made.json")) == [str(other)], "it need not be read the next time"
    assert derive(text, trained="the run") == ("ONE", False), "the old name is still in config.yaml"
    third = other.rename(text.with_name("c.txt"))
    for name in (third, other, text):
        assert derive(name, trained="the run") == ("ONE", False)
    text.write_text("two")
    with pytest.raises(InputError, match=f"{text} has changed"):
        derive(text, trained="the run")


def test_what_was_trained_on_is_refused(text: Path) -> None:
    derive(text)
    text.write_text("two")
    with pytest.raises(InputError, match=rf"the copy: {text} has changed, and the run was trained on it: restore that"):
        derive(text, trained="the run")
    assert text.with_name("made").read_text() == "ONE"
    other = text.with_name("b.txt")
    other.write_text("three")
    with pytest.raises(InputError, match=rf"the copy: it was made from {text}, now {other} is named, and the run was"):
        derive(other, trained="the run")
    with pytest.raises(InputError, match="the copy: its case was upper, now it is lower"):
        derive(text, {"case": "lower"}, trained="the run")


def test_a_source_that_is_gone(text: Path, caplog: pytest.LogCaptureFixture) -> None:
    """What was made of it still serves whoever names it; it cannot pass for that of another one."""
    caplog.set_level("INFO", "megajax")
    derive(text)
    text.unlink()
    assert derive(text, trained="the run") == ("ONE", False)
    assert f"{text} is gone: what was made from it is used" in caplog.text
    with pytest.raises(FileNotFoundError):
        derive(text.with_name("b.txt"))


def test_without_a_record(text: Path, caplog: pytest.LogCaptureFixture) -> None:
    """What an older version has made is adopted once it was trained on, and else made again."""
    caplog.set_level("INFO", "megajax")
    text.with_name("made").write_text("OLD")
    assert derive(text, trained="the run") == ("OLD", False)
    assert f"the copy: taken as it is; from now on {text} counts as what it was made from" in caplog.text
    assert derive(text) == ("OLD", False)
    text.with_name("made.json").write_text("{")
    assert derive(text) == ("ONE", True)


def test_a_source_that_changes_while_it_is_read(text: Path) -> None:
    """The record is of the source as it was before: the next start finds another one."""
    record = text.with_name("made.json")
    MadeFrom([text], {}).make(record, lambda: text.write_text("changed meanwhile"))
    assert MadeFrom([text], {}).difference(record) == f"{text} has changed"


def test_nothing_is_recorded_of_what_failed(text: Path) -> None:
    record = text.with_name("made.json")
    derive(text)
    text.write_text("two")
    with pytest.raises(ZeroDivisionError):
        MadeFrom([text], {"case": "upper"}).ensure("it", record, lambda: 1 / 0, there=True, trained="")
    assert not record.exists()
    assert derive(text) == ("TWO", True)
