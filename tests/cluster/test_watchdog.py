"""The watchdog ends a process that is alone; `test_jobs` has a hang of one among several."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

from megajax.cluster.watchdog import Watchdog

HANG = """
import time
from megajax.cluster.watchdog import Watchdog

def waiting_for_godot():
    time.sleep(60)

with Watchdog(0.5, "runs/x") as dog:
    dog.beat("step 7")
    waiting_for_godot()
"""


@pytest.mark.slow
def test_a_hang_ends_with_stacks_and_code_4():
    start = time.monotonic()
    root = Path(__file__).parents[2]
    done = subprocess.run([sys.executable, "-c", HANG], cwd=root, capture_output=True, text=True, check=False)
    assert time.monotonic() - start < 30
    assert done.returncode == 4
    assert done.stderr.startswith("megajax: runs/x: no progress for 0.5 s after step 7; the stacks of all threads:")
    assert "in waiting_for_godot" in done.stderr


@pytest.mark.slow
def test_beats_and_suspension_keep_it_quiet():
    """It would end this very process."""
    with Watchdog(0.4, "test") as dog:
        for step in range(4):
            time.sleep(0.2)
            dog.beat(f"step {step}")
        with dog.patient():
            time.sleep(0.7)
        time.sleep(0.2)
    with dog, dog.patient():  # again: the time since does not count
        time.sleep(0.7)
    with Watchdog(None, "test"):
        time.sleep(0.1)
    time.sleep(0.5)  # left: nobody watches any more
