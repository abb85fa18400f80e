"""Two processes of four devices train as one process of eight devices does, though each reads only its own samples.

The processes are real and talk over gloo. This file is also what they run:

    python -m tests.parallel.test_two_processes COORDINATOR NUMBER
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import pytest

from megajax.config import ParallelConfig
from megajax.planning.equivalence import compile_layout, random_batch
from tests.harness import BATCH, GPT, tiny_config

pytestmark = pytest.mark.slow

LAYOUTS = {
    # Mesh axes are slowest first: where there are stages, each process is one.
    "pipe": ParallelConfig(pipe=2, data=2, tensor=2),
    "interleaved": ParallelConfig(pipe=2, chunks=2, data=2, tensor=2),
    "data": ParallelConfig(data=8),
}
STEPS, MINUTES = 3, 5


def train(parallel: ParallelConfig) -> dict[str, Any]:
    """Losses of a few steps, and the rows of a global batch that this process had to load."""
    config = replace(tiny_config(replace(GPT, num_layers=4)), parallel=parallel)
    state, step, feed, _ = compile_layout(config)
    rows, losses = feed.rows(BATCH), []
    for number in range(STEPS):
        mine = {name: array[rows] for name, array in random_batch(config, number).items()}
        state, metrics = step(state, feed.place(mine, BATCH))
        losses.append(float(metrics["lm loss"]))
    return {"rows": rows.tolist(), "losses": losses}


def main(coordinator: str, number: int) -> None:
    """One of the two processes: train every layout and print what came out."""
    jax.config.update("jax_num_cpu_devices", 4)
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(coordinator, num_processes=2, process_id=number)
    assert (jax.local_device_count(), jax.device_count()) == (4, 8)
    print(json.dumps({name: train(parallel) for name, parallel in LAYOUTS.items()}))


def start(coordinator: str, number: int) -> subprocess.Popen[str]:
    flags = os.environ["XLA_FLAGS"].replace("--xla_force_host_platform_device_count=8", "")
    root = Path(__file__).parents[2]
    command = [sys.executable, "-m", "tests.parallel.test_two_processes", coordinator, str(number)]
    environment = os.environ | {"XLA_FLAGS": flags, "PYTHONPATH": str(root)}
    return subprocess.Popen(
        command, cwd=root, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


@pytest.fixture(scope="module")
def outcomes() -> list[dict[str, Any]]:
    """What each of the two processes printed."""
    with socket.create_server(("localhost", 0)) as server:
        coordinator = f"localhost:{server.getsockname()[1]}"
    processes = [start(coordinator, number) for number in range(2)]
    try:
        printed = [process.communicate(timeout=60 * MINUTES) for process in processes]
    finally:
        for process in processes:
            process.kill()
    for process, (_, errors) in zip(processes, printed, strict=True):
        assert process.returncode == 0, errors
    return [json.loads(output.splitlines()[-1]) for output, _ in printed]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_losses_are_those_of_one_process(outcomes: list[dict[str, Any]], layout: str):
    losses = [outcome[layout]["losses"] for outcome in outcomes]
    assert losses[0] == losses[1]
    assert losses[0] == pytest.approx(train(LAYOUTS[layout])["losses"], rel=1e-6)


def test_a_process_loads_its_own_samples(outcomes: list[dict[str, Any]]):
    """Both stages of a pipeline see all samples (embedding and loss are everyone's work); replicas see their own."""
    rows = {layout: [outcome[layout]["rows"] for outcome in outcomes] for layout in LAYOUTS}
    everything = list(range(BATCH))
    assert rows["pipe"] == rows["interleaved"] == [everything, everything]
    assert rows["data"] == [everything[:4], everything[4:]]


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
