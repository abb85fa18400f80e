"""A directory of checkpoints belongs to one run, which may move."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from megajax.checkpoint.directory import Owner
from megajax.checkpoint.store import Checkpoints
from megajax.config import CheckpointConfig, InputError
from tests.checkpoint.small import restored_step, save_steps, small_state

ONE, TWO = Owner("1", "/runs/one"), Owner("2", "/runs/two")


def save(directory: Path, owner: Owner, step: int) -> None:
    with Checkpoints(directory, CheckpointConfig(), owner) as checkpoints:
        checkpoints.save(step, small_state(step), {"step": step})


def test_another_run_neither_writes_nor_reads(tmp_path: Path) -> None:
    save(tmp_path, ONE, 1)
    for config in (CheckpointConfig(), None):
        with pytest.raises(
            InputError, match=f"{tmp_path} holds the checkpoints of the run /runs/one, not of /runs/two"
        ):
            Checkpoints(tmp_path, config, TWO)
    with (tmp_path / "owner.json").open() as being_read:
        save(tmp_path, ONE._replace(path="/elsewhere/one"), 2)
        assert "/runs/one" in being_read.read(), "another process sees the old name or the new one, and never half"
    with Checkpoints(tmp_path, None, ONE) as checkpoints:
        assert (restored_step(checkpoints), checkpoints.steps) == (2, [1, 2])
    with pytest.raises(InputError, match="of the run /elsewhere/one, not of /runs/two"):
        Checkpoints(tmp_path, None, TWO)


def test_an_empty_directory_is_taken_at_the_first_start(tmp_path: Path) -> None:
    """Before there is anything in it: a second run that starts at the same time finds it taken."""
    with Checkpoints(tmp_path, CheckpointConfig(), ONE), pytest.raises(InputError, match="of the run /runs/one"):
        Checkpoints(tmp_path, CheckpointConfig(), TWO)


def test_checkpoints_that_do_not_say_whose_they_are(tmp_path: Path) -> None:
    """As older versions left them: in the directory of the run they are its own, elsewhere nobody knows."""
    run = Owner("1", str(tmp_path / "run"))
    save_steps(tmp_path / "run/checkpoints", [1])
    shutil.copytree(tmp_path / "run/checkpoints", tmp_path / "elsewhere")
    with pytest.raises(InputError, match=f"{tmp_path}/elsewhere holds checkpoints of a run that it does not name"):
        save(tmp_path / "elsewhere", run, 2)
    with Checkpoints(tmp_path / "elsewhere", None, run) as checkpoints:
        assert restored_step(checkpoints) == 1, "to look is no harm"
    save(tmp_path / "run/checkpoints", run, 2)
    with pytest.raises(InputError, match=f"of the run {run.path}, not of /runs/two"):
        Checkpoints(tmp_path / "run/checkpoints", None, TWO)


def test_a_damaged_name(tmp_path: Path) -> None:
    save(tmp_path, ONE, 1)
    (tmp_path / "owner.json").write_text("{")
    with pytest.raises(InputError, match=r"owner.json is damaged: delete it, if you know whose checkpoints these are"):
        Checkpoints(tmp_path, None, ONE)
