"""Files appear whole or not at all, and one process at a time holds a lock."""

import threading
from pathlib import Path

import pytest

from megajax.config.base import NotReady
from megajax.files import atomic_write, held_alone, remove_leftovers
from megajax.training.run_directory import RunDirectory


@pytest.mark.parametrize("durable", [True, False])
def test_a_write_that_fails_leaves_the_file_before(tmp_path: Path, durable: bool) -> None:
    path = tmp_path / "a"
    path.write_text("before")
    with pytest.raises(KeyError), atomic_write(path, durable=durable) as file:
        file.write(b"half")
        raise KeyError
    assert [(entry.name, entry.read_text()) for entry in tmp_path.iterdir()] == [("a", "before")]
    with atomic_write(path, durable=durable) as file:
        file.write(b"after")
        assert path.read_text() == "before"
    assert path.read_text() == "after"


def test_leftovers_of_killed_writers_go_and_files_being_written_stay(tmp_path: Path) -> None:
    (tmp_path / f".a.{'0' * 32}").touch()
    (tmp_path / f".b.{'0' * 32}").touch()
    with atomic_write(tmp_path / "a") as file:
        remove_leftovers(tmp_path / "a")
        file.write(b"whole")
    assert sorted(entry.name for entry in tmp_path.iterdir()) == [f".b.{'0' * 32}", "a"]
    assert (tmp_path / "a").read_text() == "whole"


def test_a_lock_is_held_by_one_and_let_go_at_the_end(tmp_path: Path) -> None:
    refused: list[str] = []

    def second() -> None:
        try:
            with held_alone(tmp_path / "lock", NotReady("somebody holds it")):
                refused.append("no")
        except NotReady as error:
            refused.append(str(error))

    with held_alone(tmp_path / "lock", NotReady("nobody can")):
        thread = threading.Thread(target=second)
        thread.start()
        thread.join()
    second()
    assert refused == ["somebody holds it", "no"]


def test_a_start_that_was_killed_while_it_wrote_its_first_file_is_no_stranger(tmp_path: Path) -> None:
    """What is left of writing config.yaml is not taken for files of somebody else."""
    (tmp_path / f".config.yaml.{'0' * 32}").touch()
    with RunDirectory(tmp_path).locked(first=True):
        assert (tmp_path / "config.lock").exists()
