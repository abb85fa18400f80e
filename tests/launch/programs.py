"""Small programs that tests start as a job, and how to start a launcher."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).parents[2]


def launch(tool: str, *words: str, **variables: str) -> subprocess.Popen[str]:
    """A launcher in a process of its own, output captured."""
    environment = os.environ | {"PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"} | variables
    command = [sys.executable, "-m", f"launch.{tool}", *words]
    return subprocess.Popen(
        command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def finish(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    """Exit code and what was printed."""
    out, err = process.communicate(timeout=60)
    return process.returncode, out, err


def python(code: str) -> list[str]:
    """The command line of a Python program."""
    return ["--", sys.executable, "-c", f"import os, signal, sys, time\nrank = int(os.environ.get('RANK', 0))\n{code}"]


def until(condition: Callable[[], object], seconds: float = 20) -> None:
    """Wait for something to become true."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it never happened"
        time.sleep(0.02)


def alive(pid: int) -> bool:
    """Whether a process runs (one that ended and was not waited for does not)."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False
