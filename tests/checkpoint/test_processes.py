"""Two processes: they take the same decision when only one of them finds a checkpoint damaged."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
CODE = """
import logging, os, sys
from pathlib import Path
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import NamedSharding, PartitionSpec as P
from megajax.checkpoint.store import Checkpoints
from megajax.config import CheckpointConfig

process, port, root = int(sys.argv[1]), sys.argv[2], Path(sys.argv[3])
logging.basicConfig(format="%(message)s", stream=sys.stdout, level=logging.WARNING, force=True)
jax.distributed.initialize(f"127.0.0.1:{port}", 2, process, heartbeat_timeout_seconds=20)
mesh = jax.make_mesh((4,), ("x",))
places = {"w": NamedSharding(mesh, P("x")), "n": NamedSharding(mesh, P())}
draw = jax.jit(lambda step: {"w": jnp.arange(64.0).reshape(8, 8) + step, "n": step}, out_shardings=places)
like = jax.eval_shape(draw, jnp.int32(0))
run = lambda: Checkpoints(root / "run", CheckpointConfig(keep_last=3, local=str(root / "fast")))

def restored():
    with run() as checkpoints:
        state, record = checkpoints.restore(like, places)
        for shard in state["w"].addressable_shards:
            np.testing.assert_array_equal(shard.data, (np.arange(64.0).reshape(8, 8) + record["step"])[shard.index])
        assert state["w"].sharding == places["w"] and checkpoints.latest == record["step"]
        return record["step"]

with run() as checkpoints:
    for step in (1, 2):
        checkpoints.save(step, draw(jnp.int32(step)), {"step": step})
    checkpoints.save_local(3, draw(jnp.int32(3)), {"step": 3})
print(restored())
if process == 1:
    (root / "run/2/state/w/3.0").unlink()  # read by process 1 only
    os.truncate(next(root.glob("fast/*/process-1/3/w.1")), 8)
print(restored())
print(restored())
"""


def test_both_go_by_what_one_of_them_finds(tmp_path: Path) -> None:
    """Local copies of step 3, then step 1, as step 2 is damaged; process 0 reports it. Read again by one process."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    environment = {**os.environ, "XLA_FLAGS": "--xla_force_host_platform_device_count=2"}
    processes = [
        subprocess.Popen([sys.executable, "-c", CODE, str(process), str(port), str(tmp_path)], cwd=ROOT, text=True,
                         env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        for process in (0, 1)
    ]  # fmt: skip
    outputs = [process.communicate(timeout=120) for process in processes]
    assert [process.returncode for process in processes] == [0, 0], outputs
    said = [[line for line in out.splitlines() if "Gloo" not in line] for out, _ in outputs]
    assert said[1] == ["3", "1", "1"]
    assert said[0][0] == "3" and said[0][3:] == ["1", "1"]
    assert said[0][1].startswith("the local copies of step 3 are of no use:")
    assert said[0][1].endswith("/process-1/3/w.1 is too short (process 1)")
    assert said[0][2].startswith(f"{tmp_path}/run/2 is damaged ([Errno 2] No such file or directory")
    assert said[0][2].endswith("(process 1)): passed over")
    assert {path.name for path in (tmp_path / "run").iterdir()} == {"1", "damaged-2", "local-copies"}
