"""The GPU smoke test works as a program, with small models on a CPU."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_tiny():
    flags = os.environ["XLA_FLAGS"].replace("--xla_force_host_platform_device_count=8", "")
    command = [sys.executable, "-m", "tests.gpu.smoke", "--tiny"]
    environment = os.environ | {"XLA_FLAGS": flags, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    table = done.stdout[done.stdout.index("cpu (cpu), jax") :].splitlines()
    assert [re.match(r"(.*?)  ", line)[1] for line in table[2:6]] == [
        "tiny fp32", "tiny bf16", "quickstart fp32", "GPT-3 1.3B bf16"
    ]  # fmt: skip
    # The same program on the same device: the same losses to the last bit.
    assert [line for line in table if "at most 0.0e+00" in line] == table[6:8]
    assert table[8:] == ["all checks hold"]
