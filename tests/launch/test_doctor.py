"""The doctor, on a machine that has no GPU, and with checks that find something."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from launch.doctor import Verdict, check_disk, check_versions, examine
from tests.launch.programs import finish, launch


def test_a_machine_without_gpu_is_well(tmp_path: Path):
    variables = {"XLA_FLAGS": "--xla_force_host_platform_device_count=2", "SLURM_JOB_ID": "7"}
    returned, out, err = finish(launch("doctor", "--directory", str(tmp_path / "new"), **variables))
    assert returned == 0, err
    assert all(re.match(r"(ok   |warn ) ", line) for line in out.splitlines())
    for expected in (
        "warn  no NVIDIA driver or GPU here", "ok    Python 3.", "JAX finds 2 x cpu (cpu)", "TFLOP/s in fp32",
        "all-reduce over 2 devices", "time of day 20", "processes: 1 (SLURM: ", "new: writes ",
    ):  # fmt: skip
        assert expected in out, expected


def test_a_check_that_raises_has_failed(capfd: pytest.CaptureFixture[str]):
    def check_something():
        yield Verdict("ok", "first")
        raise RuntimeError("two\nlines")

    assert examine([check_something, lambda: iter([Verdict("warn", "last", "do this")])]) == 1
    assert capfd.readouterr().out.splitlines() == [
        "ok    first", "FAIL  check_something: RuntimeError: two lines", "warn  last (do this)"
    ]  # fmt: skip


def test_a_file_is_no_directory(tmp_path: Path, capfd: pytest.CaptureFixture[str]):
    (tmp_path / "file").write_text("")
    assert examine([lambda: check_disk(tmp_path / "file")]) == 1
    assert "FileExistsError" in capfd.readouterr().out


def test_the_plugin_has_to_be_of_jaxlibs_version(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A package that is found on the path before any other."""
    info = tmp_path / "jax_cuda13_plugin-0.1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: jax-cuda13-plugin\nVersion: 0.1\n")
    monkeypatch.syspath_prepend(tmp_path)
    (found,) = [verdict for verdict in check_versions() if "cuda13" in verdict.what]
    assert (found.level, found.remedy) == ("FAIL", "install the same version")


def test_with_a_pretended_gpu(tmp_path: Path):
    """A driver without anything for JAX to use it with: three failures, each with its remedy."""
    tool = tmp_path / "nvidia-smi"
    tool.write_text(
        '#!/bin/sh\ncase "$1" in *=name) echo NVIDIA H100 80GB HBM3;; *=driver_version) echo 550.54;; '
        "*=memory.used) echo 4000 MiB;; *) echo 0;; esac\n"
    )
    tool.chmod(0o755)
    path = f"{tmp_path}:{os.environ['PATH']}"
    returned, out, _ = finish(launch("doctor", "--directory", str(tmp_path), PATH=path))
    assert returned == 1
    assert "FAIL  JAX finds " in out
    assert "warn  MiB of GPU memory in use already: 4000" in out
    settings = finish(launch("env", "--export", PATH=path))[1]
    assert "export XLA_PYTHON_CLIENT_MEM_FRACTION=0.92" in settings
