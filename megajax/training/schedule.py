"""Learning rate as a function of the samples consumed by successful steps (Megatron-LM's parameter scheduler).

The counter n is in samples, so a batch-size ramp-up does not bend the curve, and it stands still when a step is
skipped. A step uses the counter *before* its own samples are added. The first step of a run uses n = 0, which with a
warm-up is `warmup_init_lr` (0 by default: that step moves nothing); the minimum is reached at n = decay, so a run that
decays over its whole length ends one step above it.

A run whose length is given in steps has its schedule in steps as well: when it goes on with another batch size, a step
still moves along the curve as far as with the first batch size (`Stretch`). A run whose length is given in samples has
its schedule in samples.

The counter is int32 (2.1e9 samples). float32 counts exactly only to 2^24 = 16.8e6, so comparisons and differences of
counts stay in integers and only their final ratio, accurate to 1e-7, is a float.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from megajax.config.base import InputError
from megajax.config.train import OptimConfig, TrainConfig


class Stretch(NamedTuple):
    """A part of a run with one batch size: from `start` samples of good steps on, `size` samples count as
    `planned`.
    """

    start: int
    size: int
    planned: int


def stretches_of(train: TrainConfig, before: Sequence[Stretch], samples: int) -> tuple[Stretch, ...]:
    """List the stretches of a run that begins or goes on with the batch size of `train`; none if samples count.

    Args:
        train: batch size, and whether the run is counted in steps or in samples.
        before: stretches of the run so far; empty for a new run.
        samples: samples consumed by good steps so far.

    Raises:
        InputError: the run changes from steps to samples after its batch size has changed.
    """
    size = train.global_batch_size
    if train.steps is None:
        if len(before) > 1:
            raise InputError(
                "train.samples: the batch size of this run has changed, and its learning rate goes by steps since: "
                "give its length as train.steps"
            )
        return ()
    if not samples or not before:
        return (Stretch(0, size, size),)
    done = tuple(stretch for stretch in before if stretch.start < samples)
    return done if done[-1].size == size else (*done, Stretch(samples, size, done[0].planned))


@dataclass(frozen=True)
class Schedule:
    """The resolved numbers of a schedule, with lengths in samples from the start of the run."""

    peak: float
    """Learning rate at the end of the warm-up."""
    minimum: float
    """Learning rate from `decay` on (except for the constant style)."""
    warmup_init: float
    """Learning rate at n = 0 if there is a warm-up."""
    warmup: int
    """Length of the linear warm-up."""
    decay: int
    """End of the decay, counted from the start of the run."""
    wsd: int
    """Length of the final decay of the wsd style."""
    style: str
    """Name of the curve: constant, linear, cosine, inverse_sqrt or wsd."""
    wsd_style: str
    """Shape of the final decay of wsd: linear, cosine, exponential or minus_sqrt."""
    stretches: tuple[Stretch, ...] = ()
    """Stretches that say how far samples move along the curve; empty if each sample counts as one."""

    @classmethod
    def of_run(
        cls, optim: OptimConfig, train: TrainConfig, steps: int, samples: int, stretches: tuple[Stretch, ...]
    ) -> Schedule:
        """Return the schedule of a run with these total steps and samples.

        Raises:
            InputError: the run is too long for the counter.
        """
        _check_counter(samples)
        planned = stretches[0].planned if stretches else train.global_batch_size
        schedule = cls.from_config(optim, steps * planned if len(stretches) > 1 else samples, planned)
        return replace(schedule, stretches=stretches)

    @classmethod
    def from_config(cls, optim: OptimConfig, total_samples: int, global_batch_size: int) -> Schedule:
        """Return the schedule of a configuration, with steps converted to samples by the (final) global batch size.

        Args:
            optim: schedule as the user wrote it, checked by `OptimConfig` and `config.checks`.
            total_samples: length of the run; the decay ends there unless `optim` says otherwise.
            global_batch_size: samples per step.

        Raises:
            InputError: the run is too long for the counter.
        """

        def length(samples: int | None, steps: int | None) -> int:
            return samples or (steps or 0) * global_batch_size

        _check_counter(total_samples)
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


def _check_counter(samples: int) -> None:
    if samples > np.iinfo(np.int32).max:
        raise InputError(f"{samples} samples do not fit the int32 counter: raise data.seq_length")


def learning_rate(samples: ArrayLike, schedule: Schedule) -> jax.Array:
    """Return the learning rate after `samples` samples.

    Args:
        samples: integer count of samples consumed by successful steps; any shape, traced or not.
        schedule: resolved schedule, static under jit.

    Returns:
        The learning rate, float32 in the shape of `samples`.
    """
    s = schedule
    n = _planned(jnp.asarray(samples, jnp.int32), s.stretches)
    warm = s.warmup_init + (s.peak - s.warmup_init) * (n / max(s.warmup, 1))
    decayed = jnp.clip(_decayed(n, s), s.minimum, s.peak)
    lr = jnp.where((n <= s.warmup) & (s.warmup > 0), jnp.minimum(warm, s.peak), decayed)
    return lr.astype(jnp.float32)


def _planned(n: jax.Array, stretches: tuple[Stretch, ...]) -> jax.Array:
    """Return how far along the curve a run is after n samples."""
    if len(stretches) < 2:  # with one batch size every sample counts as one
        return n
    planned = jnp.zeros_like(n)
    ends = [*(stretch.start for stretch in stretches[1:]), np.iinfo(np.int32).max]
    for stretch, end in zip(stretches, ends, strict=True):
        planned += jnp.clip(n - stretch.start, 0, end - stretch.start) // stretch.size * stretch.planned
    return planned


def _decayed(n: jax.Array, s: Schedule) -> jax.Array:
    if s.style == "constant":
        return jnp.full(n.shape, s.peak)
    if s.style == "inverse_sqrt":
        lr = s.peak * jnp.sqrt(max(s.warmup, 1) / jnp.maximum(n, 1))
    else:
        lr = s.minimum + _coefficient(n, s) * (s.peak - s.minimum)
    return jnp.where(n > s.decay, s.minimum, lr)


def _coefficient(n: jax.Array, s: Schedule) -> jax.Array:
    """Return the remaining share of (peak - minimum)."""
    if s.style == "wsd":
        return _shape(s.wsd_style, _ratio(n, s.decay - s.wsd, s.decay))
    return _shape(s.style, _ratio(n, s.warmup, s.decay))


def _ratio(n: jax.Array, start: int, end: int) -> jax.Array:
    """Return the progress from `start` (0) to `end` (1); an empty interval has ended."""
    return jnp.clip((n - start) / (end - start), 0.0, 1.0) if end > start else jnp.ones(n.shape)


def _shape(style: str, r: jax.Array) -> jax.Array:
    """Return the height at r of a curve that decays from 1 at r = 0 to 0 at r = 1."""
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
