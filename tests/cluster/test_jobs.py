"""Real jobs of two processes: they join, they differ, one of them fails. This file is also what the processes run:

python -m tests.cluster.test_jobs WHAT COORDINATOR NUMBER
"""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from megajax.cluster import Cluster, Watchdog, check_devices, detect, join
from megajax.config import ClusterConfig, InputError
from megajax.config.cli import entry_point

pytestmark = pytest.mark.slow

SECONDS = 60
HOST = socket.gethostname()


def steps(cluster: Cluster) -> Iterator[int]:
    """Six steps that need both processes."""
    mesh = Mesh(np.array(jax.devices()), ("data",))
    rows, total = NamedSharding(mesh, PartitionSpec("data")), NamedSharding(mesh, PartitionSpec())
    add = jax.jit(lambda numbers: numbers.sum(), out_shardings=total)
    for step in range(6):
        mine = np.array([cluster.process + 1.0], np.float32)
        assert add(jax.make_array_from_process_local_data(rows, mine)) == 3.0
        yield step


@entry_point
def main(argv: list[str]) -> None:
    """One of the processes."""
    what, coordinator, number = argv
    jax.config.update("jax_num_cpu_devices", 2 if what == "devices" and number == "1" else 1)
    config = ClusterConfig(
        coordinator=coordinator, processes=2, process=int(number), start_seconds=SECONDS, heartbeat_seconds=10
    )
    launch = detect({}, config)
    identity = {"config": number if what == "config" else "same"}
    cluster = join(launch, config, identity)
    with cluster.guard():
        if what == "devices":
            check_devices(cluster, SECONDS)
        with cluster.first_alone("data"):
            print("made" if cluster.first else "found", time.monotonic())
        with cluster.guard(), Watchdog(1.5 if what == "hang" else None, "runs/x", cluster) as dog:
            for step in steps(cluster):
                dog.beat(f"step {step}")
                if step == 3 and number == "1":
                    misbehave(what)
    if what == "fine":
        again = join(launch, config, identity)
        with again.guard():
            assert again == cluster
        try:
            join(detect({}, ClusterConfig(coordinator=coordinator, processes=3, process=0)), config, identity)
        except InputError as error:
            print(error)


def misbehave(what: str) -> None:
    match what:
        case "raise":
            raise RuntimeError("no such sample")
        case "input":
            raise FileNotFoundError(2, "No such file", "tokens.bin")
        case "exit":
            os._exit(7)
        case "hang":
            time.sleep(SECONDS)
        case "stop":
            subprocess.Popen(f"sleep 20; kill -KILL {os.getpid()}", shell=True)  # so that the test ends
            os.kill(os.getpid(), signal.SIGSTOP)


def run(what: str) -> list[tuple[int, str, str]]:
    """Exit code, stdout and stderr of the two processes of a job."""
    with socket.create_server(("localhost", 0)) as server:
        coordinator = f"localhost:{server.getsockname()[1]}"
    flags = os.environ["XLA_FLAGS"].replace("--xla_force_host_platform_device_count=8", "")
    root = Path(__file__).parents[2]
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.cluster.test_jobs", what, coordinator, str(number)],
            cwd=root, env=os.environ | {"XLA_FLAGS": flags, "PYTHONPATH": str(root)}, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )
        for number in range(2)
    ]  # fmt: skip
    try:
        printed = [process.communicate(timeout=SECONDS) for process in processes]
    finally:
        for process in processes:
            process.kill()
    return [(process.returncode, *texts) for process, texts in zip(processes, printed, strict=True)]


def own_lines(errors: str) -> list[str]:
    """What MegaJAX said."""
    return [line for line in errors.splitlines() if line.startswith("megajax:")]


def test_two_processes_join_and_leave():
    """To join once more is no error, to join another job is."""
    outcomes = run("fine")
    assert [code for code, _, _ in outcomes] == [0, 0], outcomes
    (_, first, _), (_, second, _) = outcomes
    made, found = re.search(r"^made (.+)$", first, re.M), re.search(r"^found (.+)$", second, re.M)
    assert made and found and float(made[1]) <= float(found[1])
    for _, out, _ in outcomes:
        assert "megajax: this process has joined the others before: going on with them" in out
        assert "(cluster.* keys): restart it to change that" in out


@pytest.mark.parametrize(("what", "each"), [("config", ("1", "0")), ("devices", ("2 x cpu", "1 x cpu"))])
def test_both_name_the_process_that_differs(what: str, each: tuple[str, str]):
    line = (
        f"process 1 ({HOST}) has {what} {each[0]}, process 0 ({HOST}) has {each[1]}: it has to be the same everywhere"
    )
    for code, _, errors in run(what):
        assert code == 2
        assert line in own_lines(errors)[0]


@pytest.mark.parametrize(
    ("what", "codes", "line"),
    [
        ("raise", [1, 1], "RuntimeError: no such sample"),
        ("input", [2, 2], "error: tokens.bin: No such file"),
        ("exit", [1, 7], "ended without a word"),
    ],
)
def test_one_failure_ends_both_and_is_the_first_line_of_each(what: str, codes: list[int], line: str):
    outcomes = run(what)
    assert [code for code, _, _ in outcomes] == codes, outcomes
    for number, (_, _, errors) in enumerate(outcomes):
        if what == "exit" and number == 1:
            continue  # it had no time to say anything
        assert own_lines(errors)[0].startswith(f"megajax: process 1 ({HOST})")
        assert line in own_lines(errors)[0]
    assert ("Traceback" in outcomes[1][2]) == (what == "raise")
    assert "Traceback" not in outcomes[0][2]


def test_a_process_that_stands_still_is_missed():
    """By the heartbeats of JAX's service, long before the watchdog; takes `heartbeat_seconds` and a little."""
    (code, _, errors), (stopped, _, _) = run("stop")
    assert (code, stopped) == (-signal.SIGABRT, -signal.SIGKILL)
    assert "heartbeat" in errors.lower()


def test_a_hang_shows_where_everyone_was():
    outcomes = run("hang")
    assert [code for code, _, _ in outcomes] == [4, 4]
    for _, _, errors in outcomes:
        assert "runs/x: no progress for 1.5 s after step" in own_lines(errors)[0]
    assert "in steps" in outcomes[0][2]  # waiting for process 1
    assert "in misbehave" in outcomes[1][2]


if __name__ == "__main__":
    sys.exit(main())
