"""A directory of checkpoints belongs to one run, and keeps the configured checkpoints."""

from __future__ import annotations

import math
import shutil
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megajax.checkpoint.directory import Owner, kept
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


@pytest.mark.parametrize(
    ("config", "losses", "expected"),
    [
        ({"keep_last": 2}, {}, {30, 40}),
        ({"keep_last": 1, "keep_every": 20}, {}, {20, 40}),
        ({"keep_last": 2, "keep_best": True}, {10: 3.0, 20: 1.0, 30: 2.0, 40: 2.5}, {20, 40}),
        ({"keep_last": 2, "keep_best": True}, {10: 3.0, 20: 2.0, 30: 1.5, 40: 1.0}, {30, 40}),
        ({"keep_last": 2, "keep_best": False}, {20: 1.0}, {30, 40}),
        ({"keep_last": 1, "keep_best": True}, {20: 1.0}, {20, 40}),
        ({"keep_last": 1, "keep_best": True}, {20: 1.0, 40: 0.5}, {40}),
        ({"keep_last": 1, "keep_best": True}, {20: math.nan}, {40}),
        ({"keep_last": 1, "keep_best": True}, {15: 0.5, 20: 1.0}, {20, 40}),  # 15 was evaluated, not saved
        ({"keep_last": 3, "keep_best": True, "keep_every": 10}, {10: 1.0}, {10, 20, 30, 40}),
    ],
)
def test_by_hand(config: dict, losses: dict[int, float], expected: set[int]) -> None:
    """The best takes the place of one of the newest, the newest always stays."""
    assert kept([10, 20, 30, 40], CheckpointConfig(**config), losses) == expected


@given(
    steps=st.sets(st.integers(0, 200), min_size=1),
    last=st.integers(1, 5),
    losses=st.dictionaries(st.integers(0, 200), st.floats(allow_nan=True)),
)
def test_the_newest_and_the_best_always_stay(steps: set[int], last: int, losses: dict[int, float]) -> None:
    keep = kept(steps, CheckpointConfig(keep_last=last, keep_best=True), losses)
    assert max(steps) in keep <= steps
    assert len(keep) <= max(last, 2)
    rated = {step: losses[step] for step in steps if math.isfinite(losses.get(step, math.nan))}
    if rated:
        assert min(rated.values()) in {rated[step] for step in keep & rated.keys()}
