"""Checkpoints: atomic, strict, and from any mesh to any mesh."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from megajax.checkpoint.store import Checkpoints
from megajax.config import CheckpointConfig, ConfigError, ParallelConfig
from megajax.data.batch import make_batch
from megajax.training.step import build_init
from tests.harness import BATCH, GPT, compile_layout, gathered, random_samples, tiny_config

ROOT = Path(__file__).parents[2]
SAVED_ON = ParallelConfig(data=2, tensor=4)
State = dict[str, jax.Array]


def small_state(value: float, size: int = 4) -> State:
    """A state of two arrays."""
    return {"weight": jnp.full((size,), value), "count": jnp.int32(value)}


def shardings(state: State) -> Any:
    """Everything on the first device."""
    return jax.tree.map(lambda _: jax.sharding.SingleDeviceSharding(jax.devices()[0]), state)


def save_steps(directory: Path, steps: list[int], **config: Any) -> None:
    """Save small states, each holding its step number."""
    with Checkpoints(directory, CheckpointConfig(**config)) as checkpoints:
        for step in steps:
            checkpoints.save(step, small_state(step), {"step": step})


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
    """Case K01: saved on 8 devices, restored on others, equal to the bit after gathering, optimizer state included."""
    directory, arrays = saved
    config = tiny_config(GPT, 1)
    _, _, _, rules = compile_layout(config, layout)
    _, abstract, places = build_init(config, rules)
    with Checkpoints(directory, None) as checkpoints:
        restored = checkpoints.restore(abstract, places)
    assert restored.record == {"version": 1, "step": 1, "consumed_samples": 8}
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
    """Case K09: the newest always stays."""
    save_steps(tmp_path, [1, 2, 3], **config)
    with Checkpoints(tmp_path, None) as checkpoints:
        assert checkpoints.steps == kept


def test_an_interrupted_save_is_no_checkpoint(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Case K03: the rest of a save is named and passed over; asking for it is an error; saving it again works."""
    save_steps(tmp_path, [10])
    shutil.copytree(tmp_path / "10", tmp_path / "20.orbax-checkpoint-tmp-0")
    with Checkpoints(tmp_path, CheckpointConfig()) as checkpoints:
        assert "20.orbax-checkpoint-tmp-0 is the rest of a save that was interrupted" in caplog.text
        assert checkpoints.latest == 10
        state = small_state(0)
        with pytest.raises(ConfigError, match="no finished checkpoint of step 20: finished are 10"):
            checkpoints.restore(state, shardings(state), 20)
        checkpoints.save(20, small_state(20), {"step": 20})
        checkpoints.wait()
        assert checkpoints.restore(state, shardings(state)).state["count"] == 20


def test_a_save_that_fails_is_an_error_that_names_the_directory(tmp_path: Path) -> None:
    """Case K05: the background save's error surfaces; what was finished stays. In a process of its own, as Orbax's
    threads outlive the failure."""
    directory = tmp_path / "run"
    save_steps(directory, [1])
    code = f"""
import os, sys
from pathlib import Path
import jax.numpy as jnp
from megajax.checkpoint.store import Checkpoints
from megajax.config import CheckpointConfig, ConfigError
directory = Path({str(directory)!r})
checkpoints = Checkpoints(directory, CheckpointConfig())
directory.rename({str(tmp_path / "moved")!r})
directory.write_text("a file where the directory was")
try:
    checkpoints.save(2, {{"weight": jnp.ones(4)}}, {{"step": 2}})
    checkpoints.wait()
except ConfigError as error:
    print(error, flush=True)
    os._exit(2)
"""
    process = subprocess.run(
        [sys.executable, "-c", code], text=True, capture_output=True, cwd=ROOT, timeout=120, check=False
    )
    assert process.returncode == 2, process.stderr
    assert f"saving a checkpoint to {directory} failed" in process.stdout
    with Checkpoints(tmp_path / "moved", None) as moved:
        assert moved.steps == [1]


def test_a_damaged_checkpoint_is_named(tmp_path: Path) -> None:
    """Its files are emptied: one line that says which to remove."""
    save_steps(tmp_path, [1])
    for path in (tmp_path / "1" / "state").rglob("*"):
        if path.is_file():
            path.write_bytes(b"")
    state = small_state(0)
    with Checkpoints(tmp_path, None) as checkpoints, pytest.raises(ConfigError, match=f"remove {tmp_path}/1"):
        checkpoints.restore(state, shardings(state))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda s: {"renamed": s["weight"], "count": s["count"]}, "lacks renamed"),
        (lambda s: {"weight": s["weight"]}, "holds count, which this model lacks"),
        (lambda s: {**s, "new": s["count"]}, "lacks new"),
        (lambda s: {**s, "weight": jnp.zeros(5)}, r"weight is \(4,\) there and \(5,\) in this model"),
    ],
    ids=["renamed", "removed", "added", "reshaped"],
)
def test_arrays_must_match_by_name_and_shape(tmp_path: Path, change: Any, message: str) -> None:
    """Case K15: nothing is left at its random start."""
    save_steps(tmp_path, [1])
    wanted = change(small_state(0))
    with Checkpoints(tmp_path, None) as checkpoints, pytest.raises(ConfigError, match=message):
        checkpoints.restore(wanted, shardings(wanted))


def test_another_format_version_is_refused(tmp_path: Path) -> None:
    """Case K15: the version is part of the record."""
    with Checkpoints(tmp_path, CheckpointConfig()) as checkpoints:
        checkpoints.save(1, small_state(1), {"version": 0})
        checkpoints.wait()
        state = small_state(0)
        with pytest.raises(ConfigError, match="format 0, this version of megajax reads 1"):
            checkpoints.restore(state, shardings(state))


def test_an_empty_directory_holds_nothing_to_restore(tmp_path: Path) -> None:
    """Case K11."""
    state = small_state(0)
    with Checkpoints(tmp_path, None) as checkpoints, pytest.raises(ConfigError, match="finished are none"):
        checkpoints.restore(state, shardings(state))


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
