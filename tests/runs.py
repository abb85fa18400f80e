"""A tiny training run through its command line, for the tests that start, stop, kill and compare such runs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import orbax.checkpoint as ocp

ROOT = Path(__file__).parents[1]
WORDS = [
    "tokenizer.type=null", "tokenizer.vocab_size=50", "data.split=90,10,0", "data.seq_length=16",
    "model.num_layers=2", "model.hidden_size=32", "model.num_heads=4", "model.max_positions=32",
    "model.hidden_dropout=0.1", "train.global_batch_size=8", "train.micro_batch_size=4", "train.steps=20",
    "optim.lr=1e-2", "optim.warmup_steps=3", "checkpoint.every=10", "evaluation.every=10", "evaluation.steps=2",
    "log.every=5", "log.tensorboard=false", "parallel.data=1", "parallel.fsdp=2", "parallel.tensor=2",
    "parallel.simulate_devices=4",
]  # fmt: skip


ALL_DEVICES = ["parallel.simulate_devices=0", "parallel.data=2", "train.micro_batch_size=2"]
"""Instead of four simulated ones in a process of its own: the eight of this process."""


def start(corpus: Path, output: Path, *words: str, before: str = "") -> subprocess.Popen[str]:
    """A real training process; `before` is Python that runs first."""
    arguments = [*WORDS, f"data.text={corpus}", f"output_dir={output}", *words]
    code = f"{before}\nimport sys\nfrom megajax.train import main\nsys.exit(main({arguments!r}))"
    return subprocess.Popen(
        [sys.executable, "-c", code], cwd=ROOT, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )


def start_job(
    corpus: Path, output: Path, *words: str, processes: int, devices: int, before: str = ""
) -> subprocess.Popen[str]:
    """The same as a job of several processes; `before` runs in each, which finds its number in `rank`."""
    arguments = [*WORDS, "parallel.simulate_devices=0", f"data.text={corpus}", f"output_dir={output}", *words]
    code = (
        f"import os, sys\nrank = int(os.environ['RANK'])\n{before}\n"
        f"from megajax.train import main\nsys.exit(main({arguments!r}))"
    )
    launcher = ["-m", "launch.local", "--processes", str(processes), "--devices", str(devices), "--"]
    flags = os.environ["XLA_FLAGS"].replace("--xla_force_host_platform_device_count=8", "")
    return subprocess.Popen(
        [sys.executable, *launcher, sys.executable, "-c", code],
        cwd=ROOT, env=os.environ | {"XLA_FLAGS": flags}, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip


def finish(process: subprocess.Popen[str], seconds: float = 300) -> tuple[int, str, str]:
    """Exit code and what was printed; a process that takes too long is killed."""
    try:
        out, err = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        process.kill()
        out, err = process.communicate()
        raise AssertionError(f"still there after {seconds} s:\n{out}\n{err}") from None
    return process.returncode, out, err


def records(output: Path) -> list[dict[str, object]]:
    """metrics.jsonl without what differs from run to run."""
    lines = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    return [{key: value for key, value in line.items() if key != "timing"} for line in lines]


def arrays(output: Path, step: int) -> dict[str, np.ndarray]:
    """Every array of a checkpoint, read with Orbax alone."""
    path = output / f"checkpoints/{step}/state"
    with ocp.PyTreeCheckpointer() as reader:
        names = reader.metadata(path).item_metadata.tree
        as_numpy = {name: ocp.RestoreArgs(restore_type=np.ndarray) for name in names}
        return reader.restore(path, ocp.args.PyTreeRestore(restore_args=as_numpy))


def assert_same_run(output: Path, undisturbed: Path) -> None:
    """Byte-equal parameters and optimizer state, equal metrics."""
    expected = arrays(undisturbed, 20)
    found = arrays(output, 20)
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert found[name].tobytes() == value.tobytes(), name
    assert records(output) == records(undisturbed)
