"""The benchmarks compare what they claim to compare; their times are for people to read."""

from dataclasses import replace

import numpy as np
import pytest

from bench import compile_depth, framework_overhead


@pytest.mark.slow
def test_bare_step_is_the_same_mathematics(capsys: pytest.CaptureFixture[str]):
    """Three steps from the same weights: the same losses, so the same gradients and updates."""
    model = replace(framework_overhead.GPT, num_layers=2, hidden_size=64, num_heads=2, max_positions=32, vocab_size=256)
    seconds, losses = framework_overhead.compare(*framework_overhead.steps_of(model, batch=4), rounds=1)
    np.testing.assert_allclose(losses[:, 0], losses[:, 1], rtol=1e-6)
    assert (np.diff(losses, axis=0) < 0).all()
    assert framework_overhead.report(seconds, losses) == 0
    assert framework_overhead.report(seconds, losses + [[0, 0.01]] * 3) == 1
    assert capsys.readouterr().out.count("ratio") == 2


@pytest.mark.slow
def test_eight_times_the_depth_is_the_same_program():
    """To a few instructions: the compiler cuts arrays of other sizes into other pieces."""
    shallow, deep = compile_depth.SHALLOW, compile_depth.DEEP
    steps = {layers: compile_depth.compile_step(layers)[0] for layers in (shallow, deep)}
    size = {layers: step.as_text().count("\n") for layers, step in steps.items()}
    assert size[deep] == pytest.approx(size[shallow], rel=0.05)
    np.testing.assert_allclose(*compile_depth.losses_of(steps), rtol=1e-5)
