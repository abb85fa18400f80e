"""Learning rate as a function of the samples that successful steps have consumed (Megatron-LM's parameter scheduler).

The counter n is in samples, so a batch-size ramp-up does not bend the curve, and it stands still when a step is
skipped. A step uses the counter *before* its own samples are added. The first step of a run uses n = 0, which with a
warm-up is `warmup_init_lr` (0 by default: that step moves nothing); the minimum is reached at n = decay, so a run that
decays over its whole length ends one step above it.

The counter is int32 (2.1e9 samples). float32 counts exactly only to 2^24 = 16.8e6, so comparisons and differences of
counts stay in integers and only their final ratio, accurate to 1e-7, is a float.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from megajax.config.base import ConfigError
from megajax.config.optim import OptimConfig


@dataclass(frozen=True)
class Schedule:
    """A resolved schedule; lengths in samples, from the start of the run."""

    peak: float
    """Learning rate at the end of the warm-up."""
    minimum: float
    """Learning rate from `decay` on (except for the constant style)."""
    warmup_init: float
    """Learning rate at n = 0, when there is a warm-up."""
    warmup: int
    """Length of the linear warm-up."""
    decay: int
    """Where the decay ends, warm-up included."""
    wsd: int
    """Length of the final decay of the wsd style."""
    style: str
    """constant, linear, cosine, inverse_sqrt or wsd."""
    wsd_style: str
    """Shape of the final decay of wsd: linear, cosine, exponential or minus_sqrt."""

    @classmethod
    def from_config(cls, optim: OptimConfig, total_samples: int, global_batch_size: int) -> Schedule:
        """Count everything in samples: steps are multiplied by the (final) global batch size.

        Args:
            optim: Schedule as the user wrote it, checked by `config.checks`.
            total_samples: Length of the run; where the decay ends unless `optim` says otherwise.
            global_batch_size: Samples per step.

        Raises:
            ConfigError: The run is too long for the counter.
        """

        def length(samples: int | None, steps: int | None) -> int:
            return samples or (steps or 0) * global_batch_size

        if total_samples > np.iinfo(np.int32).max:
            raise ConfigError(f"{total_samples} samples do not fit the int32 counter: raise data.seq_length")
        decay = length(optim.decay_samples, optim.decay_steps) or total_samples
        warmup = length(optim.warmup_samples, optim.warmup_steps)
        if optim.warmup_fraction is not None:
            warmup = round(optim.warmup_fraction * decay)
        return cls(
            peak=optim.lr,
            minimum=optim.min_lr,
            warmup_init=optim.warmup_init_lr,
            warmup=warmup,
            decay=decay,
            wsd=length(optim.wsd_samples, optim.wsd_steps),
            style=optim.decay_style,
            wsd_style=optim.wsd_style,
        )


def learning_rate(samples: ArrayLike, schedule: Schedule) -> jax.Array:
    """Learning rate after `samples` samples.

    Args:
        samples: Integer count of samples seen by successful steps; any shape, traced or not.
        schedule: Static under jit.

    Returns:
        float32, the shape of `samples`.
    """
    n = jnp.asarray(samples, jnp.int32)
    s = schedule
    warm = s.warmup_init + (s.peak - s.warmup_init) * (n / max(s.warmup, 1))
    decayed = jnp.clip(_decayed(n, s), s.minimum, s.peak)
    lr = jnp.where((n <= s.warmup) & (s.warmup > 0), jnp.minimum(warm, s.peak), decayed)
    return lr.astype(jnp.float32)


def _decayed(n: jax.Array, s: Schedule) -> jax.Array:
    if s.style == "constant":
        return jnp.full(n.shape, s.peak)
    if s.style == "inverse_sqrt":
        lr = s.peak * jnp.sqrt(max(s.warmup, 1) / jnp.maximum(n, 1))
    else:
        lr = s.minimum + _coefficient(n, s) * (s.peak - s.minimum)
    return jnp.where(n > s.decay, s.minimum, lr)


def _coefficient(n: jax.Array, s: Schedule) -> jax.Array:
    """Share of (peak - minimum) that is left."""
    if s.style == "wsd":
        return _shape(s.wsd_style, _ratio(n, s.decay - s.wsd, s.decay))
    return _shape(s.style, _ratio(n, s.warmup, s.decay))


def _ratio(n: jax.Array, start: int, end: int) -> jax.Array:
    """Progress from `start` (0) to `end` (1); an empty interval is already over."""
    return jnp.clip((n - start) / (end - start), 0.0, 1.0) if end > start else jnp.ones(n.shape)


def _shape(style: str, r: jax.Array) -> jax.Array:
    """Decay from 1 at r = 0 to 0 at r = 1."""
    match style:
        case "linear":
            return 1 - r
        case "cosine":
            return 0.5 * (jnp.cos(jnp.pi * r) + 1)
        case "exponential":
            return 2 * 0.5**r - 1
        case "minus_sqrt":
            return 1 - jnp.sqrt(r)
        case _:
            raise ValueError(f"unknown decay shape {style!r}")
