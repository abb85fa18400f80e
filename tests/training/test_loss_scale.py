"""Dynamic loss scaling: every constant of Megatron-LM's scaler, traced by hand."""

from functools import partial

import jax
import jax.numpy as jnp
import pytest

from megajax.config.train import LossScaleConfig
from megajax.training.loss_scale import check_loss_scale, init_loss_scale, update_loss_scale


def trace(config, overflows):
    """States before the first step and after each one."""
    update = jax.jit(partial(update_loss_scale, config=config))
    states = [init_loss_scale(config)]
    for overflow in overflows:
        states.append(update(states[-1], jnp.bool_(overflow)))
    return states


def scales(states):
    return [float(state.scale) for state in states]


def test_defaults_are_megatrons():
    first = init_loss_scale(LossScaleConfig())
    assert float(first.scale) == 2.0**32
    assert (int(first.growth_tracker), int(first.hysteresis_tracker), int(first.skips_at_minimum)) == (0, 2, 0)
    config = LossScaleConfig()
    assert (config.window, config.minimum) == (1000, 1.0)


def test_first_overflow_costs_nothing_then_each_one_halves():
    config = LossScaleConfig(initial=64, hysteresis=2)
    assert scales(trace(config, [True] * 4)) == [64, 64, 32, 16, 8]
    config = LossScaleConfig(initial=64, hysteresis=3)
    assert scales(trace(config, [True] * 4)) == [64, 64, 64, 32, 16]


def test_growth_needs_a_whole_window_of_clean_steps():
    config = LossScaleConfig(initial=64, window=3)
    states = trace(config, [False, False, True, False, False, False, False])
    assert scales(states) == [64, 64, 64, 64, 64, 64, 128, 128]
    assert [int(s.growth_tracker) for s in states] == [0, 1, 2, 0, 1, 2, 0, 1]


def test_hysteresis_is_refilled_by_growth_only():
    config = LossScaleConfig(initial=64, window=3, hysteresis=2)
    # After two overflows, a clean step does not buy a free overflow: the third halves again.
    assert scales(trace(config, [True, True, False, True])) == [64, 64, 32, 32, 16]
    # Growth does: the next overflow is free.
    states = trace(config, [True, True, False, False, False, True, True])
    assert scales(states) == [64, 64, 32, 32, 32, 64, 64, 32]
    assert [int(s.hysteresis_tracker) for s in states] == [2, 1, 0, 0, 0, 2, 1, 0]


def test_endless_overflow_halves_to_the_minimum_and_stops_the_run():
    """65536 (kept once by the hysteresis), 32768, ..., 1, then an error after a set number of skips."""
    config = LossScaleConfig(initial=65536, hysteresis=2, minimum=1, max_skips_at_minimum=3)
    states = trace(config, [True] * 20)
    assert scales(states) == [65536, 65536, *(2.0**n for n in range(15, -1, -1)), 1, 1, 1]
    skips = [int(s.skips_at_minimum) for s in states]
    assert skips == [0] * 18 + [1, 2, 3]
    for count in skips[:-1]:
        check_loss_scale(count, config)
    with pytest.raises(FloatingPointError, match=r"3 steps in a row at the smallest loss scale \(1\)"):
        check_loss_scale(skips[-1], config)


def test_a_clean_step_forgives_skips_at_the_minimum():
    config = LossScaleConfig(initial=1, minimum=1, hysteresis=1)
    assert [int(s.skips_at_minimum) for s in trace(config, [True, True, False, True])] == [0, 1, 2, 0, 1]


def test_constant_scale_never_moves_but_is_watched():
    """Not even after the 1000 clean steps that double a dynamic one."""
    states = trace(LossScaleConfig(constant=128), [True, True, *[False] * 1001, True])
    assert set(scales(states)) == {128}
    assert [int(s.skips_at_minimum) for s in states] == [0, 1, 2, *[0] * 1001, 1]


def test_state_keeps_its_types():
    before, after = trace(LossScaleConfig(), [True])
    assert jax.tree.map(lambda x: (x.shape, x.dtype), before) == jax.tree.map(lambda x: (x.shape, x.dtype), after)
