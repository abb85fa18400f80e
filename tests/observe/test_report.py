"""The reporter takes the metrics of a training loop, and reports them one step late."""

import json
import re
import time

import jax.numpy as jnp
import numpy as np
import pytest

from megajax.config.config import LogConfig
from megajax.observe.goodput import Clock
from megajax.observe.pace import ENOUGH
from megajax.observe.report import LateMetrics, Reporter
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


def open_reporter(directory, resumed_step=0, total_steps=5):
    return Reporter(LogConfig(every=2, tensorboard=False), directory, total_steps, resumed_step, THROUGHPUT, Clock())


def test_a_small_run(tmp_path, capsys):
    with open_reporter(tmp_path) as reporter:
        for step in range(1, 6):
            with reporter.during("input"):
                time.sleep(0.001)
            before = reporter.step(step, 4 * step, 4, device_metrics(loss=10.0 - step, skipped=step == 3))
            assert before is None if step in (1, 3) else before.step == step - 1
            if step == 2:
                assert reporter.flush().step == 2
                with reporter.during("evaluation"):
                    time.sleep(0.2)
                reporter.evaluation(step, 4 * step, {"lm loss": 7.0}, "validation")
                with reporter.during("checkpoint"):
                    time.sleep(0.2)
                reporter.saved(step, 0.314, asynchronous=True)

    out = capsys.readouterr().out
    assert out.startswith("MFU = model FLOPs")
    lines = re.findall(r"iteration +(\d+)/ +5 .* lm loss: (\S+) .* skipped iterations: +(\d).*input wait", out)
    assert lines == [("2", "8.500000E+00", "0"), ("4", "6.000000E+00", "1"), ("5", "5.000000E+00", "0")]
    assert out.index("iteration        2/") < out.index("validation loss at iteration 2") < out.index("4/       5")
    assert out.count("memory: n/a on this device") == 1
    assert "saved step 2 in 0.31 s (blocking), writing goes on\n" in out
    step_time, goodput = out.splitlines()[-2:]
    assert step_time.startswith("step time of the last 4 steps: p50 ")
    assert re.fullmatch(r"goodput [\d.]+ % of [\d.]+ s: .*", goodput)
    assert "evaluation" in goodput and "checkpoint" in goodput and "input" in goodput

    records = read_records(tmp_path)
    assert [record["step"] for record in records] == [1, 2, 2, 3, 4, 5]
    assert records[0].keys() >= {"lm loss", "learning-rate", "grad-norm", "loss-scale", "batch-size"}
    assert records[0]["timing"].keys() == {"iteration-time", "throughput", "tokens-per-second"}
    assert records[2]["lm loss validation"] == 7.0
    assert records[3]["skipped"] == 1.0
    assert records[3]["timing"]["save-time"] == 0.314
    assert 0.001 < records[3]["timing"]["iteration-time"] < 0.2  # with input, without evaluation and checkpoint
    assert records[4]["timing"].keys() >= {"goodput", "iteration-time-p50", "iteration-time-p99", "iteration-time-max"}


def test_every_step_of_simulated_devices_has_its_own_time(tmp_path):
    """The first one, the last one, and those around an evaluation. Dispatching a step waits for it here."""
    with open_reporter(tmp_path) as reporter:
        for step in range(1, 6):
            time.sleep(0.02 * step)
            reporter.step(step, 4 * step, 4, device_metrics(1.0))
            if step == 3:
                reporter.flush()
                with reporter.during("evaluation"):
                    time.sleep(0.3)
    times = [record["timing"]["iteration-time"] for record in read_records(tmp_path)]
    assert [0.02 * step < seconds < 0.02 * step + 0.2 for step, seconds in enumerate(times, start=1)] == [True] * 5


def test_goodput_is_told_when_a_run_resumes(tmp_path, capsys):
    for resumed in (0, 2):
        with open_reporter(tmp_path, resumed) as reporter:
            for step in range(resumed + 1, 4):
                reporter.step(step, 4 * step, 4, device_metrics(1.0))
    whole, so_far, at_the_end = re.findall(r"goodput [\d.]+ % of .*", capsys.readouterr().out)
    assert "starts" not in whole
    assert "in 2 starts: " in so_far and "lost" in so_far  # step 3 is about to be done again
    assert "in 2 starts: " in at_the_end


def test_return_to_a_checkpoint(tmp_path):
    """Steps 3 and 4 are taken back and done again: one record each, and their time is lost."""
    with open_reporter(tmp_path) as reporter:
        for step in (1, 2, 3, 4):
            reporter.step(step, 4 * step, 4, device_metrics(1.0))
            time.sleep(0.01)
        reporter.rewind(2)
        for step in (3, 4, 5):
            reporter.step(step, 4 * step, 4, device_metrics(2.0))
    assert [(record["step"], record["lm loss"]) for record in read_records(tmp_path)] == [
        (1, 1.0),
        (2, 1.0),
        (3, 2.0),
        (4, 2.0),
        (5, 2.0),
    ]
    ledger = json.loads((tmp_path / "goodput.json").read_text())
    assert [(start["resumed"], start["step"]) for start in ledger["starts"]] == [(0, 3), (2, 5)]
    assert ledger["seconds"]["lost"] > 0.005


def test_stragglers_are_named(tmp_path, capsys):
    with open_reporter(tmp_path, total_steps=20) as reporter:
        for step in (1, 2, 3):
            with reporter.during("input"):
                time.sleep(0.03)
            reporter.step(step, 4 * step, 4, device_metrics(1.0))
        own = reporter.pace.own_seconds()
        assert 0.02 < own[0] < 1  # of the last step: the first has been left out
        reporter.hosts(np.array([own, own]), ("node-1", "node-2"))
        assert "slow" not in capsys.readouterr().out
        for step in range(4, 4 + ENOUGH):
            reporter.step(step, 4 * step, 4, device_metrics(1.0))
        reporter.hosts(np.array([own, [0.5, own[1]]]), ("node-1", "node-2"))
    assert re.search(r"slow: process 1 \(node-2\), input 0\.5\d\d s", capsys.readouterr().out)  # with what came before


def test_files_are_closed_when_the_run_fails(tmp_path):
    """An unclosed file would be a ResourceWarning, which is an error here."""
    with pytest.raises(KeyError, match="boom"), open_reporter(tmp_path) as reporter:
        reporter.step(1, 4, 4, device_metrics(1.0))
        reporter.step(2, 8, 4, device_metrics(1.0))
        raise KeyError("boom")
    assert [record["step"] for record in read_records(tmp_path)] == [1]
