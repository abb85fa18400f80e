"""Learning-rate schedule: Megatron-LM's values at the edges, and no division by zero anywhere."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megajax.config.base import InputError
from megajax.config.train import OptimConfig, TrainConfig
from megajax.training.schedule import Schedule, Stretch, learning_rate

STYLES = ("constant", "linear", "cosine", "inverse_sqrt", "wsd")


def schedule(style="linear", *, warmup=0, decay=10, wsd=4, wsd_style="linear", minimum=0.0, init=0.0):
    return Schedule(
        peak=1.0,
        minimum=minimum,
        warmup_init=init,
        warmup=warmup,
        decay=decay,
        wsd=wsd,
        style=style,
        wsd_style=wsd_style,
    )


def curve(s, n):
    """Values at 0 .. n, computed in one call."""
    return np.asarray(learning_rate(jnp.arange(n + 1), s))


def test_warmup_4_of_10():
    """The first step has learning rate 0 (Megatron-LM's choice); the minimum comes at n = decay."""
    expected = [0, 0.25, 0.5, 0.75, 1, 5 / 6, 4 / 6, 3 / 6, 2 / 6, 1 / 6, 0, 0]
    np.testing.assert_allclose(curve(schedule(warmup=4), 11), expected, atol=1e-7)


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize(("warmup", "decay"), [(0, 10), (0, 0), (10, 10), (4, 10)])
def test_edges_are_finite_and_bounded(style, warmup, decay):
    """Warm-up 0, decay 0, warm-up = total: no exception, never above the peak, at the minimum after it."""
    s = schedule(style, warmup=warmup, decay=decay, minimum=0.1, init=0.1)
    values = curve(s, decay + 1)
    assert np.isfinite(values).all()
    assert values.max() <= 1 and values.min() >= np.float32(0.1)
    assert values[-1] == np.float32(1 if style == "constant" else 0.1)


def test_warmup_starts_at_its_own_rate():
    np.testing.assert_allclose(curve(schedule(warmup=4, init=0.2), 4), [0.2, 0.4, 0.6, 0.8, 1.0], rtol=1e-6)


def test_cosine():
    values = curve(schedule("cosine", minimum=0.2), 10)
    np.testing.assert_allclose(values[[0, 5, 10]], [1.0, 0.6, 0.2], rtol=1e-6)
    np.testing.assert_allclose(values[2], 0.2 + 0.8 * 0.5 * (1 + math.cos(0.2 * math.pi)), rtol=1e-6)


def test_inverse_square_root_starts_from_the_end_of_the_warmup():
    values = curve(schedule("inverse_sqrt", warmup=4, decay=100, minimum=0.25), 101)
    np.testing.assert_allclose(values[[4, 16, 25, 64, 100, 101]], [1, 0.5, 0.4, 0.25, 0.25, 0.25], rtol=1e-6)


@pytest.mark.parametrize(
    ("wsd_style", "half_way"),
    [("linear", 0.5), ("cosine", 0.5), ("exponential", 2 * 0.5**0.5 - 1), ("minus_sqrt", 1 - 0.5**0.5)],
)
def test_wsd_is_flat_then_decays(wsd_style, half_way):
    values = curve(schedule("wsd", warmup=2, wsd_style=wsd_style), 11)
    np.testing.assert_allclose(values[2:7], 1.0)
    np.testing.assert_allclose(values[8], half_way, rtol=1e-6)
    np.testing.assert_allclose(values[10:], 0.0, atol=1e-7)


def test_long_runs_do_not_lose_samples_to_float32():
    """2^24 + 1 is no float32: with floats for counters, these two samples would be one."""
    start = 2**30
    s = schedule("wsd", decay=start + 8, wsd=8)
    np.testing.assert_array_equal(learning_rate(start + jnp.arange(9), s), 1 - np.arange(9) / 8)


def test_one_compiled_function_serves_every_step():
    compiled = jax.jit(learning_rate, static_argnums=1)
    s = schedule(warmup=4)
    assert [float(compiled(jnp.int32(n), s)) for n in (0, 2, 4)] == [0.0, 0.5, 1.0]
    assert compiled._cache_size() == 1


def test_from_config_counts_steps_in_samples():
    optim = OptimConfig(lr=1e-3, min_lr=1e-5, warmup_steps=10, decay_style="wsd", wsd_steps=5)
    s = Schedule.from_config(optim, total_samples=800, global_batch_size=8)
    assert (s.warmup, s.decay, s.wsd) == (80, 800, 40)


def test_from_config_in_samples_and_by_fraction():
    s = Schedule.from_config(OptimConfig(decay_samples=640, warmup_fraction=0.01), 1000, 8)
    assert (s.warmup, s.decay) == (6, 640)
    s = Schedule.from_config(OptimConfig(warmup_samples=50), 1000, 8)
    assert (s.warmup, s.decay) == (50, 1000)


def test_a_run_beyond_the_counter_is_refused():
    with pytest.raises(InputError, match="int32"):
        Schedule.from_config(OptimConfig(), total_samples=2**31, global_batch_size=8)
    # Also where what it really reads is too much: half of the steps with a batch 4,096 times as large.
    train, stretches = TrainConfig(steps=2**21, global_batch_size=4096), (Stretch(0, 1, 1), Stretch(2**20, 4096, 1))
    with pytest.raises(InputError, match="int32"):
        Schedule.of_run(OptimConfig(), train, 2**21, 2**20 + 2**20 * 4096, stretches)


@settings(deadline=None, max_examples=50)
@given(
    style=st.sampled_from(STYLES),
    wsd_style=st.sampled_from(("linear", "cosine", "exponential", "minus_sqrt")),
    warmup=st.integers(0, 40),
    decay=st.integers(0, 40),
    wsd=st.integers(0, 40),
    minimum=st.floats(1e-9, 1),
)
def test_never_above_peak_nor_below_the_lower_end(style, wsd_style, warmup, decay, wsd, minimum):
    s = schedule(style, warmup=warmup, decay=decay, wsd=wsd, wsd_style=wsd_style, minimum=minimum, init=minimum)
    values = curve(s, 50)
    assert values.max() <= 1 and values.min() >= np.float32(minimum)
