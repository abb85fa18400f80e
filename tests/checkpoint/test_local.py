"""Local copies are newer than the run's own checkpoints, fit the same layout only, and never come from another run."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from megajax.checkpoint.store import Checkpoints
from megajax.config import CheckpointConfig, InputError

MESH = jax.make_mesh((2, 4), ("a", "b"))
PLACES = {name: NamedSharding(MESH, PartitionSpec(*axes)) for name, axes in {"w": ("a",), "b": (), "n": ()}.items()}
State = dict[str, jax.Array]


def state_of(step: int) -> State:
    """A sharded, a replicated and a scalar array that hold their step."""
    state = {"w": jnp.arange(16.0) + step, "b": jnp.full(3, step, jnp.bfloat16), "n": jnp.int32(step)}
    return jax.device_put(state, PLACES)


def open_run(tmp_path: Path, **config: Any) -> Checkpoints:
    """The run's checkpoints with a local directory beside them."""
    return Checkpoints(tmp_path / "run", CheckpointConfig(local=str(tmp_path / "fast"), local_every=1, **config))


def restored_step(checkpoints: Checkpoints, places: Any = PLACES) -> int:
    """Restore the newest; every array has to hold that step."""
    state, record = checkpoints.restore(state_of(0), places)
    for name, value in state_of(record["step"]).items():
        np.testing.assert_array_equal(state[name], value)
        assert state[name].sharding == places[name]
    return record["step"]


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Step 1 saved, steps 2 to 4 copied."""
    with open_run(tmp_path) as checkpoints:
        checkpoints.save(1, state_of(1), {"step": 1})
        for step in (2, 3, 4):
            assert checkpoints.save_local(step, state_of(step), {"step": step}) < 60
        checkpoints.wait()
        assert checkpoints.latest == 4
    assert sorted(path.name for path in tmp_path.glob("fast/*/process-0/*")) == ["3", "4"]
    return tmp_path


def test_the_newer_one_is_resumed_from(run: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "megajax")
    with open_run(run) as checkpoints:
        assert (checkpoints.latest, restored_step(checkpoints)) == (4, 4)
        assert f"resuming from the local copies of step 4 in {run / 'fast'}" in caplog.text
        checkpoints.save(5, state_of(5), {"step": 5})
    with open_run(run) as checkpoints:
        assert (checkpoints.latest, restored_step(checkpoints)) == (5, 5)


def test_a_damaged_one_is_passed_over(run: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = next(run.glob("fast/*/process-0/4/w.0"))
    file.write_bytes(b"\0" + file.read_bytes()[1:-1] + b"\1")
    with open_run(run) as checkpoints:
        assert restored_step(checkpoints) == checkpoints.latest == 3
        assert "the local copies of step 4 are of no use: the contents of w are not what was saved" in caplog.text
        checkpoints.save_local(4, state_of(4), {"step": 4})
    with open_run(run) as checkpoints:
        assert restored_step(checkpoints) == 4


def test_a_copy_says_what_it_is_of(run: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Its record is sealed like that of a checkpoint."""
    manifest = next(run.glob("fast/*/process-0/4/manifest.json"))
    manifest.write_text(manifest.read_text().replace('"step": 4', '"step": 5'))
    with open_run(run) as checkpoints:
        assert restored_step(checkpoints) == 3
        assert "the local copies of step 4 are of no use: the record is not what was saved" in caplog.text


def test_a_copy_may_stand_between_a_damaged_checkpoint_and_an_older_one(tmp_path: Path) -> None:
    """Copy 3 is newer than checkpoint 1 and the best there is, since 4 is damaged; then 3 and 1 are tried the same."""
    with open_run(tmp_path, keep_last=2) as checkpoints:
        checkpoints.save(1, state_of(1), {"step": 1})
        checkpoints.save_local(3, state_of(3), {"step": 3})
        checkpoints.save(4, state_of(4), {"step": 4})
    (tmp_path / "run/4/record/metadata").unlink()
    with open_run(tmp_path, keep_last=2) as checkpoints:
        assert restored_step(checkpoints) == checkpoints.latest == 3
        next(tmp_path.glob("fast/*/process-0/3/w.0")).unlink()
        assert restored_step(checkpoints) == checkpoints.latest == 1
        checkpoints.save_local(3, state_of(3), {"step": 3})
        checkpoints.wait()
        assert checkpoints.latest == 3


def test_a_run_that_has_ended_leaves_no_copies(run: Path) -> None:
    with open_run(run) as checkpoints:
        checkpoints.finish()
        assert checkpoints.latest == 1
        assert not list((run / "fast").iterdir())
        assert {path.name for path in (run / "run").iterdir()} == {"1"}
        checkpoints.save_local(2, state_of(2), {"step": 2})  # it goes on after all
    with open_run(run) as checkpoints:
        assert restored_step(checkpoints) == 2


def test_another_layout_is_ignored(run: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A checkpoint serves every mesh, a copy does not."""
    with open_run(run) as checkpoints:
        assert restored_step(checkpoints, {**PLACES, "w": NamedSharding(MESH, PartitionSpec("b"))}) == 1
    assert "the local copies of step 4 are of no use: it is of another layout or model" in caplog.text


def test_a_run_that_starts_over_does_not_find_its_predecessor(run: Path) -> None:
    shutil.rmtree(run / "run")
    with open_run(run) as checkpoints:
        assert checkpoints.latest is None


def test_a_moved_run_takes_them_along_and_a_copied_one_does_not(run: Path) -> None:
    """A copy that goes on elsewhere must not find what the original has written since, nor the other way round."""

    def open_at(name: str) -> Checkpoints:
        return Checkpoints(run / name, CheckpointConfig(local=str(run / "fast"), local_every=1))

    (run / "run").rename(run / "moved")
    with open_at("moved") as checkpoints:
        assert restored_step(checkpoints) == 4
        checkpoints.save_local(5, state_of(5), {"step": 5})
    shutil.copytree(run / "moved", run / "copy")
    with open_at("copy") as checkpoints:
        assert restored_step(checkpoints) == 1
        checkpoints.save_local(9, state_of(9), {"step": 9})
    for name, newest in {"moved": 5, "copy": 9}.items():
        with open_at(name) as checkpoints:
            assert restored_step(checkpoints) == newest


def test_going_back_by_number_forgets_what_came_after(run: Path) -> None:
    with open_run(run) as checkpoints:
        assert checkpoints.restore(state_of(0), PLACES, 1).record["step"] == checkpoints.latest == 1


def test_an_unfinished_one_does_not_count(run: Path) -> None:
    path = next(run.glob("fast/*/process-0/4"))
    path.rename(path.with_name("4.unfinished"))
    with open_run(run) as checkpoints:
        assert restored_step(checkpoints) == 3


def test_copies_hold_the_state_of_their_step(tmp_path: Path) -> None:
    """The next step takes the buffers at once, and gets them."""
    add = jax.jit(lambda state: jax.tree.map(lambda x: x + 1, state), donate_argnums=0)
    state = state_of(0)
    with open_run(tmp_path) as checkpoints:
        for step in range(1, 4):
            state = add(state)
            where = state["w"].addressable_data(0).unsafe_buffer_pointer()
            checkpoints.save_local(step, state, {"step": step})
            for _ in range(3):
                state = add(state)
            assert state["w"].addressable_data(0).unsafe_buffer_pointer() == where
            checkpoints.wait()
            saved, _ = checkpoints.restore(state, PLACES)
            np.testing.assert_array_equal(saved["w"], np.arange(16.0) + 4 * step - 3)


def test_a_copy_that_cannot_be_written_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "fast").write_text("a file where the directory should be")
    with open_run(tmp_path) as checkpoints, pytest.raises(InputError, match=f"local copy to {tmp_path}/fast failed"):
        checkpoints.save_local(1, state_of(1), {"step": 1})
        checkpoints.wait()
