"""The doctor runs on a machine without a GPU, and with checks that find something."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from launch.doctor import Verdict, check_devices, check_disk, check_driver, check_versions, examine, main
from launch.env import find_gpu_type


def test_a_machine_without_gpu_is_well(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
):
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    assert main(["--directory", str(tmp_path / "new")]) == 0
    out = capfd.readouterr().out
    assert all(re.match(r"(ok   |warn ) ", line) for line in out.splitlines())
    for expected in (
        "warn  no NVIDIA driver or GPU here", "ok    Python 3.", "JAX finds 8 x cpu (cpu)", "TFLOP/s in fp32",
        "all-reduce over 8 devices", "time of day 20", "processes: 1 (SLURM: ", "new: writes ",
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


def test_with_a_pretended_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]):
    """A driver, and nothing for JAX to use it with."""
    tool = tmp_path / "nvidia-smi"
    tool.write_text(
        '#!/bin/sh\ncase "$1" in *=name) echo NVIDIA H100 80GB HBM3;; *=driver_version) echo 450.54;; '
        "*=memory.used) echo 4000 MiB;; *) echo 0;; esac\n"
    )
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    assert examine([check_driver, check_devices]) == 1
    out = capfd.readouterr().out
    assert "warn  MiB of GPU memory in use already: 4000" in out
    assert "FAIL  JAX finds 8 x cpu (cpu), the driver 1 GPU(s) (check " in out
    assert find_gpu_type() == "h100"
