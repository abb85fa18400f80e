"""Loss scaling for fp16: Megatron-LM's dynamic scaler as a pure function over four scalars.

fp16 gradients below 6e-8 vanish, so the loss is multiplied by `scale` before the backward pass and the gradients are
divided by it afterwards. A step whose gradients overflow is skipped. The first `hysteresis - 1` overflows cost nothing;
each later one halves the scale. After `window` clean steps the scale doubles; only this, and not a single clean step,
refills the hysteresis.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from megajax.config.train import LossScaleConfig


class LossScale(NamedTuple):
    """The state of the scaler, four scalars of the train state and of every checkpoint."""

    scale: jax.Array
    """float32, factor of the loss."""
    growth_tracker: jax.Array
    """int32, number of clean steps since the last overflow or growth."""
    hysteresis_tracker: jax.Array
    """int32; an overflow shrinks the scale when this is 1 or less."""
    skips_at_minimum: jax.Array
    """int32, number of skipped steps in a row at a scale that cannot shrink."""


def init_loss_scale(config: LossScaleConfig) -> LossScale:
    """Return the scaler before the first step."""
    return LossScale(
        scale=jnp.float32(config.constant or config.initial),
        growth_tracker=jnp.int32(0),
        hysteresis_tracker=jnp.int32(config.hysteresis),
        skips_at_minimum=jnp.int32(0),
    )


def update_loss_scale(state: LossScale, overflow: jax.Array, config: LossScaleConfig) -> LossScale:
    """Return the scaler after a step.

    Args:
        state: scaler that the step used.
        overflow: bool scalar, whether a gradient was inf or nan.
        config: constants of the scaler, static under jit.
    """
    shrinkable = jnp.bool_(config.constant is None) & (state.scale > config.minimum)
    stuck = jnp.where(overflow & ~shrinkable, state.skips_at_minimum + 1, 0)
    if config.constant is not None:
        return state._replace(skips_at_minimum=stuck)

    hysteresis = jnp.where(overflow, state.hysteresis_tracker - 1, state.hysteresis_tracker)
    shrunk = jnp.maximum(state.scale * 0.5, config.minimum)
    clean_steps = jnp.where(overflow, 0, state.growth_tracker + 1)
    grow = clean_steps == config.window
    return LossScale(
        scale=jnp.where(overflow & (hysteresis <= 0), shrunk, jnp.where(grow, state.scale * 2, state.scale)),
        growth_tracker=jnp.where(grow, 0, clean_steps),
        hysteresis_tracker=jnp.where(grow, config.hysteresis, hysteresis),
        skips_at_minimum=stuck,
    )


def check_loss_scale(skips_at_minimum: int, config: LossScaleConfig) -> None:
    """Stop a run whose steps are all skipped: the scale cannot shrink further and gradients still overflow.

    Raises:
        FloatingPointError: `config.max_skips_at_minimum` steps in a row were skipped.
    """
    if skips_at_minimum >= config.max_skips_at_minimum:
        raise FloatingPointError(
            f"gradients overflowed {skips_at_minimum} steps in a row at the smallest loss scale "
            f"({config.constant or config.minimum:g}): the run has diverged; lower optim.lr or use train.precision=bf16"
        )
