"""`python -m megajax.verify` prints a table of layouts, and its exit code can be trusted."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import pytest

from megajax.models.parameters import logical_axes
from megajax.parallel.run import Runner
from megajax.planning.collectives import Collective, Traffic
from megajax.verify import choose_layouts, describe, main
from tests.harness import tiny_config

ROOT = Path(__file__).parents[1]
SMALL = "verify/gpt_tiny.yaml model.num_layers=2 model.hidden_dropout=0 model.attention_dropout=0 --steps 2".split()


@pytest.mark.slow
def test_command() -> None:
    """Four of the layouts of two devices; the tool brings its own devices and leaves nothing behind."""
    command = [sys.executable, "-m", "megajax.verify", *SMALL, "--devices", "2", "--most", "4", "train.precision=bf16"]
    environment = {key: value for key, value in os.environ.items() if key not in ("XLA_FLAGS", "JAX_PLATFORMS")}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.stderr == ""
    assert done.returncode == 0
    notice, counts, yardstick, _, _, *rows, _, verdict = done.stdout.splitlines()
    assert notice.startswith("notice: train.precision bf16 -> fp32")
    assert counts.startswith("4 layouts, 2 steps each, against one device without accumulation (losses 4.")
    assert yardstick.startswith("yardstick: initial parameters bit-equal; first-step gradients within 1e-05 of")
    assert len(rows) == 4
    for row in rows:
        assert re.fullmatch(r"[\w= ]+microbatches=\d  +0  +\d.\de-\d\d  +\d.\de[+-]\d\d  none; [a-z0-9+;: ]+", row)
    assert verdict == "all layouts agree with one device"


@pytest.mark.slow
def test_a_broken_layout_is_reported(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Without the sum over replicas of one gradient, the tensor is named and the exit code is 1."""
    reduce = Runner._reduce_over_data

    def forget_positions(self: Runner, leaf: Any) -> jax.Array:
        return leaf[...] if logical_axes(leaf)[0] == "positions" else reduce(self, leaf)

    monkeypatch.setattr(Runner, "_reduce_over_data", forget_positions)
    assert main([*SMALL, "--devices", "8", "--layouts", "data=8", "--most", "1"]) == 1
    *_, row, _, verdict = capsys.readouterr().out.splitlines()
    assert re.match(r"data=8 remat=\w+ microbatches=1  0  ", row)
    assert "  gradient of position_embedding and 1 more; data: " in row
    assert verdict == "1 of 1 layouts depart"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("nowhere.yaml", "nowhere.yaml not found"),
        ("verify/gpt_tiny.yaml --devices 0", "--devices is 0: expected 1 or more"),
        ("verify/gpt_tiny.yaml --steps 0", "--steps is 0: expected 1 or more"),
        ("verify/gpt_tiny.yaml --most few", "--most: invalid int value: 'few'"),
        ("verify/gpt_tiny.yaml --layouts expert", "no layout of 8 devices has 'expert' in its name; one is called 'p"),
        ("verify/gpt_tiny.yaml --devices 5 train.global_batch_size=3", "no layout of 5 devices is legal"),
        ("verify/gpt_tiny.yaml --devices 2", "JAX already runs on 8 cpu device(s)"),
    ],
)
def test_bad_input(words: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words.split()) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert message in error


def test_a_choice_is_spread_over_all_layouts() -> None:
    config = tiny_config()
    everything = choose_layouts(config, 8)
    assert choose_layouts(config, 8, most=10_000) == everything
    few = choose_layouts(config, 8, most=3)
    assert [everything.index(layout) for layout in few] == [0, len(everything) // 3, 2 * len(everything) // 3]
    for layout in choose_layouts(config, 8, "data=2 zero=1"):
        assert (layout.parallel.data, layout.parallel.zero) == (2, 1)


def test_collectives_are_counted_by_axes() -> None:
    def record(op: str, axes: tuple[str, ...], *loop: int) -> Collective:
        return Collective(op, axes, (8,), "f32", loop, False, "")

    traffic = [
        record("reduce-scatter", ("tensor",), 4, 2),
        record("all-gather", ("tensor",), 4),
        record("all-gather", ("tensor",)),
        record("all-reduce", ("pipe", "tensor")),
        record("all-reduce", ()),
    ]
    assert describe(Traffic(tuple(traffic))) == "pipe+tensor: 1 ar; tensor: 5 ag 8 rs"
