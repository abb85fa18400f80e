"""The log line reads like Megatron-LM's, for people and for tools that parse it."""

import re
from datetime import datetime

import pytest

from megajax.observe.log_line import Interval, LogRecord, format_evaluation, format_log_line
from megajax.observe.throughput import Speed

NOW = datetime(2025, 1, 31, 12, 0, 0, 250)


def record(**changes):
    values = {
        "step": 100,
        "total_steps": 1000,
        "samples": 6400,
        "batch_size": 64,
        "speed": Speed(seconds=0.5126, tokens_per_second=127_844.3, tflops_per_device=312.45, mfu=0.3158),
        "input_share": 0.0042,
        "learning_rate": 1.5e-4,
        "loss": 6.496762,
        "loss_scale": 4294967296.0,
        "grad_norm": 1.2345,
        "skipped": 2,
        "nans": 0,
    }
    return LogRecord(**(values | changes))


def test_whole_line():
    assert format_log_line(record(), NOW) == (
        " [2025-01-31 12:00:00.000250] iteration      100/    1000 | consumed samples:         6400 |"
        " elapsed time per iteration (ms): 512.6 | throughput per GPU (TFLOP/s/GPU): 312.4 |"
        " learning rate: 1.500000E-04 | global batch size:    64 | lm loss: 6.496762E+00 | loss scale: 4294967296.0 |"
        " grad norm: 1.234 | number of skipped iterations:   2 | number of nan iterations:   0 |"
        " tokens per second: 127844.3 | MFU (%): 31.6 | input wait (%): 0.4 |"
    )


def test_third_party_parser():
    """The kind of expression that log-plotting scripts for Megatron-LM use."""
    pattern = re.compile(
        r"\[(?P<time>[^\]]+)\] iteration\s+(?P<iteration>\d+)/\s*(?P<total>\d+) \| "
        r"consumed samples:\s+(?P<samples>\d+) \| elapsed time per iteration \(ms\): (?P<ms>[\d.]+) \| "
        r"(?:throughput per GPU \(TFLOP/s/GPU\): (?P<tflops>[\d.]+) \| )?learning rate: (?P<lr>[\d.E+-]+) \| "
        r"global batch size:\s+(?P<batch>\d+) \| lm loss: (?P<loss>[\d.E+-]+) \| loss scale: (?P<scale>[\d.]+) \| "
        r"grad norm: (?P<norm>[\d.]+) \| .*number of skipped iterations:\s+(?P<skipped>\d+) \| "
        r"number of nan iterations:\s+(?P<nans>\d+) \|"
    )
    found = pattern.search(format_log_line(record(params_norm=321.0), NOW))
    assert float(found["loss"]) == 6.496762 and int(found["iteration"]) == 100 and int(found["skipped"]) == 2
    fields = dict(part.split(": ") for part in format_log_line(record(), NOW).split(" | ")[1:-1])
    assert float(fields["loss scale"]) == 2**32


def test_optional_fields():
    line = format_log_line(record(params_norm=321.0, loss=None, speed=Speed(0.5, 1.0, 2.0, None)), NOW)
    assert "| grad norm: 1.234 | params norm: 321.000 | number of skipped" in line
    assert "lm loss" not in line
    assert line.endswith("| MFU (%): n/a | input wait (%): 0.4 |")


def test_interval_averages_the_steps_that_were_taken():
    interval = Interval()
    for loss, skipped in ((4.0, False), (float("inf"), True), (9.0, True), (3.0, False)):
        interval.add(loss, skipped, samples=8, seconds=0.25, input_seconds=0.125)
    assert interval.loss == 3.5
    assert (interval.steps, interval.skipped, interval.nans) == (4, 2, 1)
    assert (interval.samples, interval.seconds, interval.input_seconds) == (32, 1.0, 0.5)


def test_interval_of_skipped_steps_has_no_loss():
    interval = Interval()
    interval.add(1.0, True, samples=8, seconds=0.25, input_seconds=0.125)
    assert interval.loss is None


def test_evaluation_lines():
    rule, line, last = format_evaluation(1000, {"lm loss": 6.496762}, "validation").split("\n")
    assert line == " validation loss at iteration 1000 | lm loss value: 6.496762E+00 | lm loss PPL: 6.629914E+02 | "
    assert rule == last == "-" * (len(line) + 1)


@pytest.mark.parametrize(("loss", "ppl"), [(0.0, "1.000000E+00"), (50.0, "4.851652E+08")])
def test_perplexity_is_cut_at_a_loss_of_20(loss, ppl):
    assert f"lm loss PPL: {ppl}" in format_evaluation(1, {"lm loss": loss}, "test")


def test_further_losses_follow_the_first():
    line = format_log_line(record(others={"sop loss": 0.693147}), NOW)
    assert "| lm loss: 6.496762E+00 | sop loss: 6.931470E-01 | loss scale" in line
