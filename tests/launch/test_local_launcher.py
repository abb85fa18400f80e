"""Several processes on this machine: their environment, their output, and their end."""

from __future__ import annotations

import signal
import time
from pathlib import Path

import pytest

from launch.local import describe
from tests.launch.programs import alive, finish, launch, python, until


def test_processes_get_the_variables_of_torchrun():
    names = "MASTER_ADDR WORLD_SIZE LOCAL_WORLD_SIZE RANK LOCAL_RANK JAX_PLATFORMS JAX_NUM_CPU_DEVICES MASTER_PORT"
    code = f"print(*(os.environ[name] for name in {names.split()!r}))"
    returned, out, err = finish(launch("local", "--processes", "2", "--devices", "3", *python(code)))
    assert (returned, err) == (0, "")
    first, second = sorted(out.splitlines())
    assert first.split()[:-1] == ["[0]", "localhost", "2", "2", "0", "0", "cpu", "3"]
    assert second.split()[:-1] == ["[1]", "localhost", "2", "2", "1", "1", "cpu", "3"]
    assert first.split()[-1] == second.split()[-1] != "0"


def test_jax_finds_the_simulated_devices():
    code = "import jax; print(jax.device_count(), jax.default_backend())"
    returned, out, _ = finish(launch("local", "--devices", "3", *python(code), XLA_FLAGS=""))
    assert (returned, out) == (0, "3 cpu\n")


def test_lines_are_prefixed_and_never_mixed():
    code = (
        "for n in range(200):\n    for part in (f'{n} ', 'x' * 3000, '\\n'):\n"
        "        os.write(1, part.encode())\nos.write(2, b'no newline')"
    )
    returned, out, err = finish(launch("local", "--processes", "3", *python(code)))
    assert returned == 0
    for rank in range(3):
        mine = [line for line in out.splitlines() if line.startswith(f"[{rank}] ")]
        assert mine == [f"[{rank}] {n} {'x' * 3000}" for n in range(200)]
    assert sorted(err.splitlines()) == [f"[{rank}] no newline" for rank in range(3)]


def test_the_first_failure_ends_all(tmp_path: Path):
    """The others may leave by themselves; who does not is told to, and then killed. The first exit code counts."""
    code = (
        "if rank == 2: signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        f"open(f'{tmp_path}/{{rank}}', 'w').close()\n"
        f"while len(os.listdir('{tmp_path}')) < 3: time.sleep(0.01)\n"
        "sys.exit(7) if rank == 1 else time.sleep(60)"
    )
    start = time.monotonic()
    returned, _, err = finish(launch("local", "--processes", "3", "--grace", "0.3", *python(code)))
    assert returned == 7
    assert time.monotonic() - start < 20
    assert [line.removeprefix("launch: ") for line in err.splitlines()] == [
        "process 1 ended with exit code 7",
        "SIGTERM goes to 2 process(es)",
        "process 0 ended with exit code 143 (SIGTERM)",
        "SIGKILL goes to 1 process(es)",
        "process 2 ended with exit code 137 (SIGKILL)",
    ]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1])
def test_signals_reach_every_process_once(tmp_path: Path, number: signal.Signals):
    code = (
        "got = []\nfor name in ('SIGTERM', 'SIGINT', 'SIGUSR1'):\n"
        "    signal.signal(getattr(signal, name), lambda number, _: got.append(number))\n"
        f"open(f'{tmp_path}/{{rank}}', 'w').close()\nwhile not got: time.sleep(0.01)\n"
        "time.sleep(0.3)\nprint('got', *got)"
    )
    process = launch("local", "--processes", "2", *python(code))
    until(lambda: len(list(tmp_path.iterdir())) == 2)
    process.send_signal(number)
    returned, out, _ = finish(process)
    assert returned == 0
    assert sorted(out.splitlines()) == [f"[0] got {int(number)}", f"[1] got {int(number)}"]


@pytest.mark.parametrize("processes", [1, 2])
def test_no_orphans_when_the_launcher_is_killed(tmp_path: Path, processes: int):
    code = f"open(f'{tmp_path}/{{os.getpid()}}', 'w').close()\ntime.sleep(60)"
    process = launch("local", "--processes", str(processes), *python(code))
    until(lambda: len(list(tmp_path.iterdir())) == processes)
    children = [int(path.name) for path in tmp_path.iterdir()]
    process.kill()
    until(lambda: not any(map(alive, children)))
    finish(process)


def test_what_a_process_started_goes_with_it(tmp_path: Path):
    code = (
        "import subprocess\nchild = subprocess.Popen(['sleep', '60'])\n"
        f"open(f'{tmp_path}/{{child.pid}}', 'w').close()\nsys.exit(5)"
    )
    assert finish(launch("local", *python(code)))[0] == 5
    (grandchild,) = [int(path.name) for path in tmp_path.iterdir()]
    until(lambda: not alive(grandchild))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--processes", "2"], "nothing to start: give a command after --"),
        (["--processes", "0", "--", "true"], "argument --processes: '0' is not a number from 1 on"),
        (["--", "no-such-program"], "no-such-program cannot be started (No such file or directory)"),
    ],
)
def test_bad_usage_is_one_line(words: list[str], message: str):
    returned, out, err = finish(launch("local", *words))
    assert (returned, out) == (2, "")
    assert message in err
    assert err.count("\n") == 1


def test_exit_codes_in_words():
    assert describe(3) == "exit code 3 (diverged)"
    assert describe(137) == "exit code 137 (SIGKILL)"
    assert describe(255) == "exit code 255"
