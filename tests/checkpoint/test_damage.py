"""Damaged checkpoints are distinguished from those of another model, and passed over."""

from __future__ import annotations

import os
import shutil
import threading
from pathlib import Path

import jax
import numpy as np
import pytest
from etils import epath
from hypothesis import given, settings
from hypothesis import strategies as st

from megajax.checkpoint import record as checking
from megajax.checkpoint.record import read_contents, verified
from megajax.checkpoint.store import Checkpoints
from megajax.config import CheckpointConfig, InputError
from megajax.config.base import NotReady
from tests.checkpoint.small import restored_step, save_steps, small_state


def flip(path: Path) -> None:
    """One bit of the last byte."""
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


def edit(path: Path, old: str, new: str) -> None:
    """Replace text in a file."""
    content = path.read_text()
    assert old in content
    path.write_text(content.replace(old, new))


DAMAGE = {
    "contents of weight are not what was saved": lambda path: flip(path / "state/weight/0"),
    "weight/0 is too short": lambda path: os.truncate(path / "state/weight/0", 15),
    "No such file": lambda path: (path / "state/count/0").unlink(),
    ".zarray: Expecting value": lambda path: (path / "state/weight/.zarray").write_text(""),
    "record: Unterminated string": lambda path: os.truncate(path / "record/metadata", 30),
    "record/metadata": lambda path: shutil.rmtree(path / "record"),
    "the record is not what was saved": lambda path: edit(path / "record/metadata", '"step": 20', '"step": 21'),
    "record: the record": lambda path: edit(path / "record/metadata", "weight", "wdight"),
    "/record: the": lambda path: edit(path / "record/metadata", '"version": 3', '"version": 4'),
    "weight/.zarray is not what": lambda path: edit(path / "state/weight/.zarray", "[4]", "[5]"),
    "count/.zarray is not what": lambda path: edit(path / "state/count/.zarray", "<i4", "<u4"),
    "zero": lambda path: edit(path / "state/weight/.zarray", '"chunks":[4]', '"chunks":[0]'),
    "not iterable": lambda path: edit(path / "state/weight/.zarray", '"chunks":[4]', '"chunks": 4 '),
    "codec can't decode": lambda path: (path / "record/metadata").write_bytes(b"{\xff}"),
}


@pytest.mark.parametrize("what", DAMAGE)
def test_a_damaged_checkpoint_is_passed_over(tmp_path: Path, caplog: pytest.LogCaptureFixture, what: str) -> None:
    """Readers leave it where it is; the run renames it, goes on from the one before, and saves its step again."""
    save_steps(tmp_path, [10, 20])
    DAMAGE[what](tmp_path / "20")
    with Checkpoints(tmp_path, None) as checkpoints:
        assert restored_step(checkpoints) == 10
        with pytest.raises(InputError, match=f"{tmp_path}/20 is damaged .*{what}"):
            restored_step(checkpoints, 20)
        assert checkpoints.steps == [10, 20]
    caplog.clear()
    with Checkpoints(tmp_path, CheckpointConfig()) as checkpoints:
        assert restored_step(checkpoints) == checkpoints.latest == 10
        (warning,) = caplog.messages
        assert warning.startswith(f"{tmp_path}/20 is damaged (") and what in warning
        assert sorted(path.name for path in tmp_path.iterdir()) == ["10", "damaged-20"]
        checkpoints.save(20, small_state(20), {"step": 20})
    with Checkpoints(tmp_path, None) as checkpoints:
        assert restored_step(checkpoints) == 20


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One small checkpoint."""
    directory = tmp_path_factory.mktemp("small")
    save_steps(directory, [20])
    return directory / "20"


@settings(max_examples=60)
@given(name=st.sampled_from(["record/metadata", "state/weight/.zarray", "state/count/.zarray"]), bit=st.integers(0))
def test_no_flipped_bit_is_taken_for_another_model(small: Path, name: str, bit: int) -> None:
    """What says what the arrays are may be damaged as well: that is found, or makes no difference."""
    whole = (small / name).read_bytes()
    content, state = bytearray(whole), small_state(20)
    content[bit // 8 % len(whole)] ^= 1 << bit % 8
    wanted = {
        name: jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=array.sharding) for name, array in state.items()
    }
    try:
        (small / name).write_bytes(content)
        found = verified(lambda: read_contents(epath.Path(small), wanted, "", set()))
    finally:
        (small / name).write_bytes(whole)
    if not isinstance(found, str):
        arrays, record = found
        assert record["step"] == 20
        np.testing.assert_array_equal(arrays["weight"], state["weight"])


def test_damage_everywhere_is_an_error(tmp_path: Path) -> None:
    save_steps(tmp_path, [10, 20])
    for step in (10, 20):
        flip(tmp_path / f"{step}/state/weight/0")
    with (
        Checkpoints(tmp_path, CheckpointConfig()) as checkpoints,
        pytest.raises(InputError, match=f"every checkpoint in {tmp_path} is damaged"),
    ):
        restored_step(checkpoints)


UNREADABLE = "/proc/self/mem"
"""Reading its start is an error of input and output (EIO), as from a disk that fails."""


@pytest.mark.parametrize("name", ["state/weight/0", "record/metadata"])
def test_what_a_disk_failed_to_read_is_not_damaged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """It is read again, and left as it is if that is of no use either; a restart finds the same newest checkpoint."""
    monkeypatch.setattr(checking, "PAUSES", (0.1, 0.1))
    save_steps(tmp_path, [10, 20])
    file = tmp_path / "20" / name
    file.rename(aside := tmp_path / "20" / "aside")
    file.symlink_to(UNREADABLE)
    with Checkpoints(tmp_path, CheckpointConfig()) as checkpoints:
        with pytest.raises(
            NotReady, match=r"a checkpoint cannot be read just now \(.*Input/output error.*\): it was left"
        ):
            restored_step(checkpoints)
        assert caplog.text.count("reading again in 0.1 s") == 2
        assert checkpoints.steps == [10, 20]
        monkeypatch.setattr(checking, "PAUSES", (1.0,))
        healing = threading.Timer(0.3, lambda: aside.replace(file))
        healing.start()
        assert restored_step(checkpoints) == 20
    assert sorted(path.name for path in tmp_path.iterdir()) == ["10", "20"]
