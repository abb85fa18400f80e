"""Speed follows from a step's samples and seconds."""

import pytest

from megajax.observe.throughput import Throughput


def throughput(peak_flops=989.5e12):
    return Throughput(
        flops_per_sample=4e12,
        tokens_per_sample=2048,
        devices=8,
        attention="full",
        peak_flops=peak_flops,
        peak_label="989.5 TFLOP/s, dense bf16 of H100",
    )


def test_speed_of_several_steps():
    """420 TFLOP/s of the dense peak."""
    speed = throughput().speed(samples=1680, seconds=2.0, steps=4)
    assert speed.seconds == 0.5
    assert speed.tokens_per_second == 1680 * 2048 / 2
    assert speed.tflops_per_device == pytest.approx(420)
    assert round(100 * speed.mfu, 1) == 42.4


def test_unknown_peak_gives_no_mfu():
    assert throughput(peak_flops=None).speed(samples=8, seconds=1.0).mfu is None


def test_description_names_formula_convention_and_peak():
    """The peak used is printed."""
    text = throughput().describe()
    assert "MFU = model FLOPs / (seconds x 8 devices x peak)" in text
    assert "full attention" in text and "989.5 TFLOP/s, dense bf16 of H100" in text
