"""The table of settings is known to XLA, overruled by the user, and usable from a shell."""

from __future__ import annotations

import os
import subprocess

import pytest

from megajax.config import InputError
from megajax.costs.gpu_settings import TABLE, TYPES, changes, compiler_options, gpu_type, settings_warning
from megajax.costs.hardware import MEMORY, MEMORY_FRACTION, gpu_named, memory_fraction
from megajax.planning.deviceless import TARGETS, _proto
from tests.launch.programs import ROOT, finish, launch, python


@pytest.mark.slow
def test_xla_knows_every_flag():
    """It ends a program that names an unknown one."""
    flags = " ".join(f"--{row.name}={row.value}" for row in TABLE if row.kind == "xla")
    code = "import jax; print(jax.device_count())"
    command = ["--devices", "2", *python(code)]
    assert finish(launch("local", *command, XLA_FLAGS=flags))[:2] == (0, "2\n")
    returned, _, err = finish(launch("local", *command, XLA_FLAGS="--xla_gpu_no_such_flag=true"))
    assert returned != 0
    assert "xla_gpu_no_such_flag" in err


def test_every_row_has_a_reason_and_a_gpu():
    assert len({row.name for row in TABLE}) == len(TABLE)
    assert all(row.reason and row.gpus and set(row.gpus) <= set(TYPES) for row in TABLE)


def test_flags_are_merged_and_the_users_choice_stays():
    given = {
        "XLA_FLAGS": "--xla_dump_to=/tmp/x --xla_gpu_enable_command_buffer=",
        "XLA_PYTHON_CLIENT_MEM_FRACTION": "0.5",
    }
    assert changes("b200", given) == {
        "XLA_FLAGS": f"{given['XLA_FLAGS']} --xla_gpu_enable_latency_hiding_scheduler=true",
        "NCCL_DEBUG": "WARN",
    }
    assert changes("h100", given | changes("h100", given)) == {}
    assert changes(None, {}) == {}
    with pytest.raises(InputError, match="no settings for GPU v100"):
        changes("v100", {})


@pytest.mark.parametrize("gpu", TYPES)
def test_a_shell_can_evaluate_it(gpu: str):
    script = f'eval "$("$PYTHON" -m launch.env --gpu {gpu} --export)"; env'
    environment = {"PATH": os.environ["PATH"], "PYTHONPATH": str(ROOT), "PYTHON": os.sys.executable}
    done = subprocess.run(["bash", "-c", script], cwd=ROOT, env=environment, capture_output=True, text=True, check=True)
    assert {f"{name}={value}" for name, value in changes(gpu, {}).items()} <= set(done.stdout.splitlines())


def test_a_machine_without_gpu_gets_nothing():
    assert finish(launch("env", "--export"))[:2] == (0, "")
    returned, out, _ = finish(launch("env"))
    assert returned == 0
    assert all(row.name in out and row.reason in out for row in TABLE)


def test_planner_and_launcher_count_with_one_memory():
    """JAX takes 0.92 of an H100's 84.9e9 bytes: 72.7 GiB, which is what the planner lets arrays have."""
    assert changes("h100", {})["XLA_PYTHON_CLIENT_MEM_FRACTION"] == str(MEMORY_FRACTION) == "0.92"
    assert gpu_named("h100").array_bytes == pytest.approx(0.92 * 84.9e9)


def test_the_users_memory_wins_with_the_planner_too(monkeypatch: pytest.MonkeyPatch):
    """By either name that JAX has for it: it refuses both beside each other, so the launcher adds none."""
    for name in ("XLA_PYTHON_CLIENT_MEM_FRACTION", "XLA_CLIENT_MEM_FRACTION"):
        assert MEMORY not in changes("h100", {name: "0.5"})
        assert changes("h100", {name: ""})[MEMORY] == "0.92"
        with monkeypatch.context() as patch:
            patch.setenv(name, "0.5")
            assert gpu_named("h100").array_bytes == pytest.approx(0.5 * 84.9e9)
            assert f"device_memory_size: {int(0.5 * 84.9e9 / 0.8)}\n" in _proto(TARGETS["H100"])
        for wrong in ("half", "0", "-1", "nan", "inf"):
            with pytest.raises(InputError, match=f"{name}={wrong} in the environment is no part of a GPU's memory"):
                memory_fraction({name: wrong})
    assert memory_fraction({MEMORY: ""}) == memory_fraction({}) == MEMORY_FRACTION


def test_a_run_that_was_started_without_the_table_says_so():
    """JAX would take 0.75 of the memory, and the planner's verdict would be about another program."""
    warning = settings_warning("NVIDIA H100 80GB HBM3", {})
    assert warning is not None
    assert "XLA_PYTHON_CLIENT_MEM_FRACTION" in warning
    assert "python -m launch.env --export" in warning
    assert settings_warning("NVIDIA H100 80GB HBM3", changes("h100", {})) is None
    assert settings_warning("cpu", {}) is None


@pytest.mark.parametrize("target", TARGETS)
def test_a_compilation_for_a_gpu_is_what_the_launcher_would_have(target: str):
    """Of the table's flags those that the user has not set, as values that XLA takes for one compilation."""
    gpu = gpu_type(target)
    flags = changes(gpu, {}).get("XLA_FLAGS", "").split()
    options = compiler_options(gpu, {})
    assert [f"--{name}={str(value).lower() if value is True else value}" for name, value in options.items()] == flags
    assert options["xla_gpu_enable_latency_hiding_scheduler"] is True
    assert compiler_options(gpu, {"XLA_FLAGS": " ".join(flags)}) == {}
