"""Two processes take the same decisions, and if one fails it does not wait for the other."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
HEAD = """
import logging, os, sys, time
from pathlib import Path
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import NamedSharding, PartitionSpec as P
from megajax.processes import gather
from megajax.checkpoint.store import Checkpoints
from megajax.config import CheckpointConfig

process, port, root = int(sys.argv[1]), sys.argv[2], Path(sys.argv[3])
logging.basicConfig(format="said: %(message)s", stream=sys.stdout, level=logging.WARNING, force=True)
jax.distributed.initialize(f"127.0.0.1:{port}", 2, process, heartbeat_timeout_seconds=20)
mesh = jax.make_mesh((4,), ("x",))
places = {"w": NamedSharding(mesh, P("x")), "n": NamedSharding(mesh, P())}
draw = jax.jit(lambda step: {"w": jnp.arange(64.0).reshape(8, 8) + step, "n": step}, out_shardings=places)
like = jax.eval_shape(draw, jnp.int32(0))
config = CheckpointConfig(keep_last=3, keep_best=True, local=str(root / "fast"), local_every=1)
run = lambda: Checkpoints(root / "run", config)
say = lambda what: print("said:", what, flush=True)  # gloo prints as well, at times half a line
"""
DECISIONS = """
def restored():
    with run() as checkpoints:
        state, record = checkpoints.restore(like, places)
        for shard in state["w"].addressable_shards:
            np.testing.assert_array_equal(shard.data, (np.arange(64.0).reshape(8, 8) + record["step"])[shard.index])
        assert state["w"].sharding == places["w"] and checkpoints.latest == record["step"]
        return record["step"]

say(list(map(len, gather("abc" if process == 0 else "ö" * 3000))))
with run() as checkpoints:
    for step in (1, 2):
        checkpoints.save(step, draw(jnp.int32(step)), {"step": step}, loss=0.5 * step)
        say(checkpoints.latest in (step - 1 or None, step))
    checkpoints.save_local(3, draw(jnp.int32(3)), {"step": 3})
say(restored())
if process == 1:
    (root / "run/2/state/w/3.0").unlink()  # read by process 1 only
    os.truncate(next(root.glob("fast/*/process-1/3/w.1")), 8)
say(restored())
with run() as checkpoints:
    say(f"{checkpoints.restore(like, places).record['step']} {checkpoints._losses()}")
    checkpoints.finish()
"""
LOST = """
big = jax.jit(lambda: {"w": jnp.ones((30_000_000,))}, out_shardings=places["w"])()
try:
    with run() as checkpoints:
        checkpoints.save(1, big, {"step": 1})
        if process == 1:
            (root / "lost").touch()
            os._exit(7)
        while not (root / "lost").exists():  # else the coordinator, process 0, could leave first and abort it
            time.sleep(0.1)
        start = time.monotonic()
        raise KeyError("what went wrong here")
except KeyError:
    say(time.monotonic() - start < 5)
    os._exit(1)
"""


def start(code: str, directory: Path) -> list[subprocess.Popen[str]]:
    """Two processes with two devices each."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    environment = {**os.environ, "XLA_FLAGS": "--xla_force_host_platform_device_count=2"}
    return [
        subprocess.Popen([sys.executable, "-c", HEAD + code, str(process), str(port), str(directory)], cwd=ROOT,
                         text=True, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        for process in (0, 1)
    ]  # fmt: skip


@pytest.mark.slow
def test_both_go_by_what_one_of_them_finds(tmp_path: Path) -> None:
    """Local copies of step 3, then step 1, as step 2 is damaged; process 0 reports it. Read again by one process."""
    processes = start(DECISIONS, tmp_path)
    outputs = [process.communicate(timeout=120) for process in processes]
    assert [process.returncode for process in processes] == [0, 0], outputs
    said = [[line.partition("said: ")[2] for line in out.splitlines() if "said: " in line] for out, _ in outputs]
    warnings = [said[0].pop(4), said[0].pop(4)]
    assert said[0] == said[1] == ["[3, 3000]", "True", "True", "3", "1", "1 {1: 0.5}"]
    assert warnings[0].startswith("the local copies of step 3 are of no use:")
    assert warnings[0].endswith("/process-1/3/w.1 is too short (process 1)")
    assert warnings[1].startswith(f"{tmp_path}/run/2 is damaged ([Errno 2] No such file or directory")
    assert warnings[1].endswith("(process 1)): passed over")
    assert {path.name for path in (tmp_path / "run").iterdir()} == {"1", "damaged-2"}
    assert not list((tmp_path / "fast").iterdir())


@pytest.mark.slow
def test_one_that_fails_does_not_wait_for_the_other(tmp_path: Path) -> None:
    """Which was lost amid a save: its error shows at once."""
    processes = start(LOST, tmp_path)
    out, error = processes[0].communicate(timeout=120)
    processes[1].communicate()
    assert [process.returncode for process in processes] == [1, 7], error
    assert out.splitlines()[-1].endswith("said: True")
