"""Bad steps are recognised, and the policy is followed."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from megajax.config import Config, HealthConfig
from megajax.observe.report import StepMetrics
from megajax.training.health import RollBack, check_step, init_health, is_spike, update_health

WATCHFUL = HealthConfig(spike_factor=2.0, window=4)


def judge(losses: list[float], config: HealthConfig = WATCHFUL) -> tuple[list[bool], list[float], list[int]]:
    """Verdict, mean and bad steps in a row after each loss; nan is an overflow."""
    health, bad_steps, means, rows = init_health(), [], [], []
    for loss in losses:
        overflow = not np.isfinite(loss)
        bad = is_spike(health, jnp.float32(loss), config) | overflow
        health = update_health(health, jnp.float32(loss), ~bad, bad, config)
        bad_steps.append(bool(bad))
        means.append(float(health.mean_loss))
        rows.append(int(health.bad_in_a_row))
    return bad_steps, means, rows


def test_a_spike_is_told_from_the_mean_of_a_whole_window() -> None:
    """Window 4, factor 2. The jump to 9 comes before there is a mean; the one to 6.1 is above 2 x 3."""
    bad, means, rows = judge([1.0, 9.0, 1.0, 1.0, 6.1, 5.0, 20.0, 20.0, 1.0])
    assert bad == [False, False, False, False, True, False, True, True, False]
    assert means == [1.0, 5.0, pytest.approx(11 / 3), 3.0, 3.0, 3.5, 3.5, 3.5, pytest.approx(2.875)]
    assert rows == [0, 0, 0, 0, 1, 0, 1, 2, 0]


def test_what_is_not_finite_is_bad_at_once_and_stays_out_of_the_mean() -> None:
    bad, means, rows = judge([float("nan"), 2.0, float("inf"), 4.0])
    assert bad == [True, False, True, False]
    assert means == [0.0, 2.0, 2.0, 3.0]
    assert rows == [1, 0, 1, 0]


def test_without_a_factor_nothing_is_a_spike() -> None:
    """Not even after the 100 good steps that the running mean is over."""
    assert judge([1.0] * 101 + [1e6], HealthConfig())[0] == [False] * 102


def bad_step(loss: float, in_a_row: int = 1) -> StepMetrics:
    scalars = {
        "skipped": 1.0, "tokens": 8.0, "bad-steps": in_a_row, "mean-loss": 2.5, "lm loss": loss, "grad-norm": 1.0,
        "learning-rate": 3e-4,
    }  # fmt: skip
    return StepMetrics(12, 96, 8, scalars)


@pytest.mark.parametrize(
    ("policy", "loss", "message"),
    [
        ("stop", float("nan"), r"the loss is nan at step 12, learning rate 0.0003; last good checkpoint: step 10 in "),
        ("stop", 7.0, r"the loss jumped to 7, its running mean is 2.5, at step 12"),
    ],
)
def test_stop(policy: str, loss: float, message: str) -> None:
    config = Config(health=HealthConfig(policy=policy))
    with pytest.raises(FloatingPointError, match=message):
        check_step(bad_step(loss), config, lambda: 10)


def test_skip_has_patience(caplog: pytest.LogCaptureFixture) -> None:
    config = Config(health=HealthConfig(policy="skip", patience=3))
    check_step(bad_step(7.0, 3), config, lambda: None)
    assert "the loss jumped to 7, its running mean is 2.5, at step 12, learning rate 0.0003: skipped" in caplog.text
    with pytest.raises(FloatingPointError, match="none was saved"):
        check_step(bad_step(7.0, 4), config, lambda: None)


def test_roll_back_needs_a_checkpoint() -> None:
    config = Config(health=HealthConfig(policy="rollback"))
    with pytest.raises(RollBack) as bad:
        check_step(bad_step(7.0), config, lambda: 10)
    assert (bad.value.step, bad.value.samples) == (12, 96)
    with pytest.raises(FloatingPointError, match="none was saved"):
        check_step(bad_step(7.0), config, lambda: None)
