"""Small programs that tests start as jobs, and functions to start a launcher."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).parents[2]
STARTED: list[subprocess.Popen[str]] = []
"""Launchers of the present test; killing one kills what it has started."""


def launch(tool: str, *words: str, **variables: str) -> subprocess.Popen[str]:
    """A launcher in a process of its own, output captured."""
    environment = os.environ | {"PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"} | variables
    command = [sys.executable, "-m", f"launch.{tool}", *words]
    process = subprocess.Popen(
        command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    STARTED.append(process)
    return process


def finish(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    """Exit code and what was printed."""
    out, err = process.communicate(timeout=100)
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


def tiny_run(directory: Path, *words: str) -> list[str]:
    """Words of `megajax.train` for a model that takes milliseconds a step, in a directory of its own."""
    corpus = directory / "numbers.jsonl"
    texts = (" ".join(str((7 * start + i) % 50) for i in range(90)) for start in range(40))
    corpus.write_text("".join(f'{{"text": "{text}"}}\n' for text in texts))
    return [
        "tokenizer.type=null", "tokenizer.vocab_size=50", "data.split=90,10,0", "data.seq_length=16",
        "model.num_layers=2", "model.hidden_size=32", "model.num_heads=4", "model.max_positions=32",
        "train.global_batch_size=4", "train.micro_batch_size=2", "optim.warmup_steps=3", "evaluation.steps=0",
        "log.every=50", "log.tensorboard=false", f"data.text={corpus}", f"output_dir={directory / 'run'}", *words,
    ]  # fmt: skip
