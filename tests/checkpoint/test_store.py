"""Checkpoints are atomic and strict, and go from any mesh to any mesh."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from etils import epath
from flax import nnx

from megajax.checkpoint.errors import one_line
from megajax.checkpoint.fingerprint import fingerprint
from megajax.checkpoint.store import Checkpoints
from megajax.config import CheckpointConfig, InputError, ParallelConfig
from megajax.data.gpt import make_batch
from megajax.training.step import build_init
from tests.checkpoint.small import restored_step, save_steps, shardings, small_state
from tests.harness import BATCH, GPT, compile_layout, gathered, random_samples, tiny_config

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
SAVED_ON = ParallelConfig(data=2, tensor=4)


def in_process(code: str) -> subprocess.CompletedProcess[str]:
    """Run code in a process that may come to harm."""
    head = """
import os, sys
from pathlib import Path
import jax.numpy as jnp
from megajax.checkpoint.store import Checkpoints
from megajax.config import CheckpointConfig, InputError
"""
    command = [sys.executable, "-c", head + code]
    return subprocess.run(command, text=True, capture_output=True, cwd=ROOT, timeout=120, check=False)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, np.ndarray]]:
    """A state after one step on data 2 x tensor 4, in a checkpoint and as numpy arrays."""
    state, step, feed, _ = compile_layout(tiny_config(GPT, 4), SAVED_ON)
    batch = make_batch(random_samples(0), np.arange(BATCH), tiny_config().data, eod=0)
    state, _ = step(state, feed.place(batch, BATCH))
    directory = tmp_path_factory.mktemp("checkpoints")
    with Checkpoints(directory, CheckpointConfig()) as checkpoints:
        checkpoints.save(1, state, {"step": 1, "consumed_samples": BATCH})
    return directory, gathered(state)


@pytest.mark.parametrize(
    "layout",
    [ParallelConfig(data=1), ParallelConfig(data=1, fsdp=8), ParallelConfig(data=1, tensor=2), ParallelConfig(data=4)],
    ids=["one-device", "fsdp-8", "tensor-2", "data-4"],
)
def test_any_mesh_to_any_mesh(saved: tuple[Path, dict[str, np.ndarray]], layout: ParallelConfig) -> None:
    """Saved on 8 devices, restored on others, equal to the bit after gathering, optimizer state included."""
    directory, arrays = saved
    config = tiny_config(GPT, 1)
    _, _, _, rules = compile_layout(config, layout)
    _, abstract, places = build_init(config, rules)
    with Checkpoints(directory, None) as checkpoints:
        restored = checkpoints.restore(abstract, places)
    fingerprints, kinds = restored.record.pop("fingerprint"), restored.record.pop("arrays")
    assert kinds["step"] == ["int32"] and kinds.keys() == fingerprints.keys()
    assert restored.record == {"version": 3, "step": 1, "consumed_samples": 8}
    assert fingerprints == fingerprint(restored.state)
    for leaf, place in zip(jax.tree.leaves(restored.state), jax.tree.leaves(places), strict=True):
        assert leaf.sharding.is_equivalent_to(place, leaf.ndim)
    for name, value in gathered(restored.state).items():
        np.testing.assert_array_equal(value, arrays[name], err_msg=name)


def test_background_saves_hold_the_state_of_their_step(tmp_path: Path) -> None:
    """Steps that follow donate and overwrite the buffers while Orbax still writes them."""
    advance = jax.jit(lambda state: jax.tree.map(lambda x: x + 1, state), donate_argnums=0)
    state = small_state(0, size=3_000_000)
    with Checkpoints(tmp_path, CheckpointConfig(keep_last=3)) as checkpoints:
        for step in range(1, 4):
            state = advance(state)
            checkpoints.save(step, state, {"step": step})
            for _ in range(3):
                state = advance(state)
        checkpoints.wait()
        for step in range(1, 4):
            weight = checkpoints.restore(state, shardings(state), step).state["weight"]
            np.testing.assert_array_equal(weight, np.full(3_000_000, 4 * step - 3))


@pytest.mark.parametrize(
    ("config", "kept"),
    [({"keep_last": 1}, [3]), ({"keep_last": 2}, [2, 3]), ({"keep_last": 1, "keep_every": 2}, [2, 3])],
)
def test_retention(tmp_path: Path, config: dict[str, int], kept: list[int]) -> None:
    """The newest always stays."""
    save_steps(tmp_path, [1, 2, 3], **config)
    with Checkpoints(tmp_path, None) as checkpoints:
        assert checkpoints.steps == kept


def test_the_best_is_kept_across_restarts(tmp_path: Path) -> None:
    """Saved every 3 steps and evaluated every 2; of 6, 12 and 18, saved with a loss, 12 is best."""
    losses = {2: 0.1, 4: 0.2, 6: 3.0, 8: 0.3, 10: 0.4, 12: 1.0, 14: 0.5, 16: 0.6, 18: 2.0}
    config = CheckpointConfig(keep_last=2, keep_best=True)
    for step in range(3, 22, 3):
        with Checkpoints(tmp_path, config) as checkpoints:
            checkpoints.save(step, small_state(step), {"step": step}, losses.get(step))
    with Checkpoints(tmp_path, None) as checkpoints:
        assert checkpoints.steps == [12, 21]
        assert restored_step(checkpoints, 12) == 12
        assert checkpoints.record(12)["loss"] == 1.0


def test_an_interrupted_save_is_no_checkpoint(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Killed while saving step 20. It is named and passed over, asked for it is an error; it can be saved."""
    process = in_process(f"""
checkpoints = Checkpoints({str(tmp_path)!r}, CheckpointConfig())
checkpoints.save(10, {{"weight": jnp.full(4, 10.0), "count": jnp.int32(10)}}, {{"step": 10}})
checkpoints.wait()
checkpoints.save(20, {{"weight": jnp.ones(50_000_000)}}, {{"step": 20}})
while not list(Path({str(tmp_path)!r}).glob("20.orbax*/*")):
    pass
os.kill(os.getpid(), 9)
""")
    assert process.returncode == -9, process.stderr
    with Checkpoints(tmp_path, CheckpointConfig()) as checkpoints:
        assert "/20.orbax-checkpoint-tmp is the rest of a save that was interrupted" in caplog.text
        assert checkpoints.latest == 10
        state = small_state(0)
        with pytest.raises(InputError, match="no finished checkpoint of step 20: finished are 10"):
            checkpoints.restore(state, shardings(state), 20)
        checkpoints.save(20, small_state(20), {"step": 20})
        checkpoints.wait()
        assert restored_step(checkpoints) == 20
    assert sorted(path.name for path in tmp_path.iterdir()) == ["10", "20"]


def test_a_save_that_fails_is_an_error_that_names_the_directory(tmp_path: Path) -> None:
    """The background save's error surfaces; what was finished stays. In a process of its own, as Orbax's
    threads outlive the failure."""
    directory = tmp_path / "run"
    save_steps(directory, [1])
    process = in_process(f"""
directory = Path({str(directory)!r})
checkpoints = Checkpoints(directory, CheckpointConfig())
directory.rename({str(tmp_path / "moved")!r})
directory.write_text("a file where the directory was")
try:
    checkpoints.save(2, {{"weight": jnp.ones(4)}}, {{"step": 2}})
    checkpoints.save(3, {{"weight": jnp.ones(4)}}, {{"step": 3}})
except InputError as error:
    print(error, flush=True)
    os._exit(2)
""")
    assert process.returncode == 2, process.stderr
    assert f"saving a checkpoint to {directory} failed" in process.stdout
    with Checkpoints(tmp_path / "moved", None) as moved:
        assert moved.steps == [1]


@pytest.mark.parametrize(
    ("error", "is_mendable"),
    [
        (OSError(errno.ENOSPC, "No space left on device"), True),
        (OSError(errno.EIO, "Input/output error"), False),
        (OSError(errno.ESTALE, "Stale file handle"), False),
        (ValueError('UNKNOWN: Error writing "w/0" [OS error 27: EFBIG File too large]'), True),
        (ValueError("UNAVAILABLE: HTTP response code: 503"), False),
        (TypeError("Object of type int32 is not JSON serializable"), False),
    ],
    ids=str,
)
def test_only_what_a_user_can_mend_is_bad_input(error: Exception, is_mendable: bool) -> None:
    """The rest keeps its type: a bug shows as one, and a supervisor may start a run again after a bad minute."""
    with pytest.raises(InputError if is_mendable else type(error)) as raised, one_line("saving", "free space"):
        raise error
    assert is_mendable == (str(raised.value) == f"saving failed ({error}): free space")


def test_too_many_open_files_are_no_want_of_space() -> None:
    message = (
        r"saving failed \(.*24: EMFILE Too many open files.*\): raise the limit \(ulimit -n\); otherwise free space"
    )
    with pytest.raises(InputError, match=message), one_line("saving", "free space"):
        raise ValueError('Error writing "w/0" [OS error 24: EMFILE Too many open files]')


def test_a_record_that_is_no_json_is_a_bug(tmp_path: Path) -> None:
    """And not for the user to mend."""
    with Checkpoints(tmp_path, CheckpointConfig()) as checkpoints:
        checkpoints.save(1, small_state(1), {"step": jnp.int32(1)})
        with pytest.raises(TypeError, match="not JSON serializable"):
            checkpoints.wait()


@pytest.mark.parametrize("config", [None, CheckpointConfig()], ids=["read", "write"])
def test_an_object_store_needs_its_package(config: CheckpointConfig | None) -> None:
    with pytest.raises(InputError, match=r"gs://bucket/run: .*gcsfs"):
        Checkpoints("gs://bucket/run", config)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda s: {"renamed": s["weight"], "count": s["count"]}, "lacks renamed"),
        (lambda s: {"weight": s["weight"]}, "holds count, which this model lacks"),
        (lambda s: {**s, "new": s["count"]}, "lacks new"),
        (lambda s: {**s, "weight": jnp.zeros(5)}, r"weight is \(4,\) there and \(5,\) in this model"),
        (lambda s: {**s, "count": jnp.zeros(())}, "count is int32 there and float32 in this model"),
    ],
    ids=["renamed", "removed", "added", "reshaped", "retyped"],
)
def test_arrays_must_match_by_name_and_shape(tmp_path: Path, change: Any, message: str) -> None:
    """Nothing is left at its random start, and another model's checkpoint is not taken for a damaged one."""
    save_steps(tmp_path, [1])
    wanted = change(small_state(0))
    with Checkpoints(tmp_path, CheckpointConfig()) as checkpoints, pytest.raises(InputError, match=message):
        checkpoints.restore(wanted, shardings(wanted))
    assert (tmp_path / "1").exists()


def test_another_format_version_is_refused(tmp_path: Path) -> None:
    """The version is part of the record."""
    with Checkpoints(tmp_path, CheckpointConfig()) as checkpoints:
        checkpoints.save(1, small_state(1), {"version": 0})
        checkpoints.wait()
        state = small_state(0)
        with pytest.raises(InputError, match="format 0, this version of megajax reads 3"):
            checkpoints.restore(state, shardings(state))


def test_a_wrong_path_is_an_error(tmp_path: Path) -> None:
    """A typo, an empty directory, a directory of another format."""
    (tmp_path / "empty").mkdir()
    (tmp_path / "other/global_step10").mkdir(parents=True)
    (tmp_path / "numbered/10").mkdir(parents=True)
    (tmp_path / "numbered/10/model.pt").write_bytes(b"weights")
    for name, message in (
        ("typo", "typo does not exist"),
        ("empty", "empty has no finished checkpoint of step None: finished are none"),
        ("other", "other has no finished checkpoint of step None: finished are none"),
        ("numbered", "numbered/10 is not a checkpoint of megajax"),
    ):
        with Checkpoints(tmp_path / name, None) as checkpoints, pytest.raises(InputError, match=message):
            restored_step(checkpoints)
    assert not (tmp_path / "typo").exists()


def test_words_beyond_the_vocabulary_of_this_model(tmp_path: Path) -> None:
    """Rows of a table may only be left out where they are padding."""
    table = nnx.Param(jnp.ones((6, 2)), axes=("vocab", "embed"), role="embedding")
    with Checkpoints(tmp_path, CheckpointConfig()) as checkpoints:
        checkpoints.save(1, {"table": table}, {"step": 1})
        like = {"table": table.replace(jnp.ones((4, 2)))}
        with pytest.raises(InputError, match="table has words beyond the 4 rows of this model"):
            checkpoints.restore(like, shardings(like))


@pytest.mark.parametrize("name", ["a run", "ünïcode", "50%25 x=1"])
def test_any_path(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Relative, as text, with letters that URLs write otherwise."""
    monkeypatch.chdir(tmp_path)
    save_steps(name, [1])
    with Checkpoints(epath.Path(name), None) as checkpoints:
        assert restored_step(checkpoints) == 1


def test_memory_does_not_grow_with_the_saves(tmp_path: Path) -> None:
    """Resident memory after 20 saves of 100 MB is within 10 % of that after 3."""
    process = in_process(f"""
state = {{f"w{{i}}": jnp.full((5_000_000,), i, jnp.float32) for i in range(5)}}
memory = []
with Checkpoints({str(tmp_path)!r}, CheckpointConfig(keep_last=1)) as checkpoints:
    for step in range(1, 21):
        checkpoints.save(step, state, {{"step": step}})
        checkpoints.wait()
        status = Path("/proc/self/status").read_text()
        memory.append(int(status.split("VmRSS:")[1].split()[0]))
print(memory[2], memory[19])
""")
    third, last = map(int, process.stdout.split())
    assert last == pytest.approx(third, rel=0.1), process.stderr


def test_a_part_of_the_state_is_read_alone(saved: tuple[Path, dict[str, np.ndarray]]) -> None:
    """Generation needs the parameters only."""
    directory, arrays = saved
    config = tiny_config(GPT, 1)
    _, _, _, rules = compile_layout(config, ParallelConfig(data=1))
    _, abstract, places = build_init(config, rules)
    with Checkpoints(directory, None) as checkpoints:
        params = checkpoints.restore(abstract.params, places.params, part="params").state
    for name, value in gathered(params).items():
        np.testing.assert_array_equal(value, arrays[f"params.{name}"], err_msg=name)


def test_room_is_looked_for_before_anything_is_computed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Refused for a run that could not save once; a warning for one that has, or that cannot keep as many."""
    free = shutil.disk_usage(tmp_path).free
    huge = jax.ShapeDtypeStruct((2 * free,), jnp.int8)
    most = jax.ShapeDtypeStruct((free // 2,), jnp.int8)
    with Checkpoints(tmp_path, CheckpointConfig(keep_last=2)) as checkpoints:
        with pytest.raises(InputError, match=r"a checkpoint needs [\d,.]+ GiB, there are [\d,.]+ GiB free: make room"):
            checkpoints.check_room({"weight": huge}, saved=False)
        checkpoints.check_room({"weight": most}, saved=False)
        checkpoints.check_room({"weight": huge}, saved=True)
        checkpoints.check_room(small_state(0), saved=False)
    first, second = caplog.messages
    assert "GiB free, for 3" in first and "a checkpoint needs" in second


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EACCES])
def test_a_lack_of_room_is_told_in_numbers(number: int) -> None:
    with (
        pytest.raises(InputError) as caught,
        one_line("saving", "make room", lambda: "a checkpoint needs 3 GiB, there are 1 GiB free"),
    ):
        raise OSError(number, os.strerror(number))
    assert ("; a checkpoint needs 3 GiB, there are 1 GiB free): make room" in str(caught.value)) == (
        number == errno.ENOSPC
    )
