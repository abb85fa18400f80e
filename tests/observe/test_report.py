"""The reporter: what a training loop hands over, one step late, and what comes out."""

import json
import re

import jax.numpy as jnp
import pytest

from megajax.config.train import LogConfig
from megajax.observe.late import LateMetrics
from megajax.observe.report import Reporter
from megajax.observe.throughput import Throughput

THROUGHPUT = Throughput(
    flops_per_sample=1e9, tokens_per_sample=16, devices=1, attention="full", peak_flops=None, peak_label="n/a"
)


def device_metrics(loss, skipped=False):
    scalars = {"lm loss": loss, "learning-rate": 1e-3, "grad-norm": 0.5, "loss-scale": 1.0, "skipped": skipped}
    return {name: jnp.asarray(value) for name, value in scalars.items()}


def read_records(directory):
    return [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]


def test_late_metrics_are_one_step_late():
    late = LateMetrics()
    assert late.push(1, 8, 8, {"lm loss": jnp.float32(3.0)}) is None
    first = late.push(2, 16, 8, {"lm loss": jnp.float32(2.0)})
    assert (first.step, first.samples, first.scalars) == (1, 8, {"lm loss": 3.0})
    assert late.pop().scalars == {"lm loss": 2.0}
    assert late.pop() is None


def test_a_small_run(tmp_path, capsys):
    with Reporter(LogConfig(every=2, tensorboard=False), tmp_path, 5, 0, THROUGHPUT) as reporter:
        for step in range(1, 6):
            before = reporter.step(step, 4 * step, 4, device_metrics(loss=10.0 - step, skipped=step == 3))
            assert before is None if step in (1, 3) else before.step == step - 1
            if step == 2:
                assert reporter.flush().step == 2
                with reporter.paused():
                    loss = 7.0
                reporter.evaluation(step, 4 * step, loss, "validation")

    out = capsys.readouterr().out
    assert out.startswith("MFU = model FLOPs")
    lines = re.findall(r"iteration +(\d+)/ +5 .* lm loss: (\S+) .* skipped iterations: +(\d)", out)
    assert lines == [("2", "8.500000E+00", "0"), ("4", "6.000000E+00", "1"), ("5", "5.000000E+00", "0")]
    assert out.index("iteration        2/") < out.index("validation loss at iteration 2") < out.index("4/       5")

    records = read_records(tmp_path)
    assert [record["step"] for record in records] == [1, 2, 2, 3, 4, 5]
    assert records[0].keys() >= {"lm loss", "learning-rate", "grad-norm", "loss-scale", "batch-size"}
    assert records[0]["timing"].keys() == {"iteration-time", "throughput", "tokens-per-second"}
    assert records[2]["lm loss validation"] == 7.0
    assert records[3]["skipped"] == 1.0


def test_files_are_closed_when_the_run_fails(tmp_path):
    """An unclosed file would be a ResourceWarning, which is an error here."""
    with pytest.raises(KeyError, match="boom"), Reporter(LogConfig(), tmp_path, 2, 0, THROUGHPUT) as reporter:
        reporter.step(1, 4, 4, device_metrics(1.0))
        reporter.step(2, 8, 4, device_metrics(1.0))
        raise KeyError("boom")
    assert [record["step"] for record in read_records(tmp_path)] == [1]
