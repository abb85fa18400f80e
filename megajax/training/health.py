"""Bad steps: their recognition, and the reaction of a run.

The device judges each step before it updates anything. A step is bad if its loss or gradient is not finite, or its loss
is far above the running mean. It changes nothing but the counters, so the state is always the last good one. The host
reads the verdict one step late and follows `health.policy`: it stops, goes on with the next batch, or returns to the
last checkpoint and skips the batches up to the bad step (PaLM, 2204.02311, section 5.1). The running mean is part of
the state, so a resumed run judges as an undisturbed one does.
"""

from __future__ import annotations

import json
import logging
import math
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp

from megajax.config.base import InputError
from megajax.config.config import Config
from megajax.config.train import HealthConfig
from megajax.files import atomic_write
from megajax.observe.report import StepMetrics
from megajax.training.loss_scale import check_loss_scale
from megajax.training.run_directory import RunDirectory

log = logging.getLogger(__name__)


class Health(NamedTuple):
    """The three scalars of a run's health, which are part of the train state and of every checkpoint."""

    mean_loss: jax.Array
    """float32, mean loss over roughly the last `health.window` good steps; older ones fade."""
    good_steps: jax.Array
    """int32, number of good steps in that mean, at most the window."""
    bad_in_a_row: jax.Array
    """int32, number of bad steps since the last good one."""


def init_health() -> Health:
    """Return the health before the first step."""
    return Health(jnp.float32(0), jnp.int32(0), jnp.int32(0))


def is_spike(health: Health, loss: jax.Array, config: HealthConfig) -> jax.Array:
    """Tell whether the loss is above `spike_factor` times a mean that a whole window of good steps has formed."""
    if config.spike_factor is None:
        return jnp.bool_(False)
    return (health.good_steps >= config.window) & (loss > config.spike_factor * health.mean_loss)


def update_health(health: Health, loss: jax.Array, good: jax.Array, bad: jax.Array, config: HealthConfig) -> Health:
    """Return the health after a step that was good, bad, or neither (a step without tokens, an fp16 overflow)."""
    weight = 1 / jnp.minimum(health.good_steps + 1, config.window).astype(jnp.float32)
    mean = health.mean_loss + weight * (loss - health.mean_loss)
    return Health(
        mean_loss=jnp.where(good, mean, health.mean_loss),
        good_steps=jnp.where(good, jnp.minimum(health.good_steps + 1, config.window), health.good_steps),
        bad_in_a_row=jnp.where(good, 0, health.bad_in_a_row + bad),
    )


class Returns:
    """Count the returns to each checkpoint of a run, in a file that outlives a crash.

    Every process counts, and the `first` one writes. A run that gives up resets the count: whoever starts it again has
    changed something.
    """

    def __init__(self, file: Path, trained: bool, first: bool) -> None:
        """Go on with the count in `file` if the run is `trained`, which means that there is a checkpoint.

        Raises:
            InputError: the file is damaged.
        """
        self._file, self._first, self._counts = file, first, Counter[str]()
        if trained and file.exists():
            try:
                self._counts.update({str(step): int(n) for step, n in json.loads(file.read_text("utf-8")).items()})
            except (ValueError, AttributeError, TypeError) as error:
                raise InputError(f"{file} is damaged: delete it, and returns count from this start on") from error

    def add(self, step: int, patience: int) -> bool:
        """Count one return to the checkpoint of a step; return False if there are now more than `patience` allows."""
        self._counts[str(step)] += 1
        patient = self._counts[str(step)] <= patience
        if self._first and patient:
            with atomic_write(self._file) as file:
                file.write(json.dumps(self._counts).encode())
        elif self._first:
            self._file.unlink(missing_ok=True)
        return patient


class RollBack(Exception):  # noqa: N818 - a way to go on, not an error
    """Report a bad step under the policy "rollback": its number, and the samples consumed up to it."""

    def __init__(self, done: StepMetrics, reason: str) -> None:
        super().__init__(reason)
        self.step, self.samples = done.step, done.samples


def check_step(done: StepMetrics | None, config: Config, last_checkpoint: Callable[[], int | None]) -> None:
    """Act on a finished step's metrics; `last_checkpoint` finds the newest checkpoint if it is needed.

    Raises:
        RollBack: the step was bad and the policy is to go back.
        FloatingPointError: the step was bad and the policy, or its patience, ends the run (fp16: too many steps
            overflowed at the smallest loss scale).
    """
    if done is None or not done.scalars["skipped"]:
        return
    if done.scalars["tokens"] == 0:
        log.warning("step %d has no unmasked token: skipped, nothing was learned from it", done.step)
        return
    if not done.scalars["bad-steps"]:  # not finite but not bad: an fp16 overflow
        check_loss_scale(int(done.scalars["skips-at-minimum"]), config.loss_scale)
        return
    health, reason = config.health, _reason(done)
    if health.policy == "skip" and done.scalars["bad-steps"] <= health.patience:
        log.warning("%s: skipped, nothing was learned from it", reason)
        return
    saved = last_checkpoint()
    if health.policy == "rollback" and saved is not None:
        raise RollBack(done, reason)
    raise FloatingPointError(f"{reason}; {_remedy(config, saved)}")


def give_up(bad: RollBack, config: Config, last_checkpoint: int) -> FloatingPointError:
    """Return the error that ends a run that went back too often."""
    times = f"went back to step {last_checkpoint} {config.health.patience} times and came no further"
    return FloatingPointError(f"{bad}; {times}; {_remedy(config, last_checkpoint)}")


def _reason(done: StepMetrics) -> str:
    loss, norm = done.scalars["lm loss"], done.scalars["grad-norm"]
    rate = f"at step {done.step}, learning rate {done.scalars['learning-rate']:g}"
    if math.isfinite(loss) and math.isfinite(norm):
        return f"the loss jumped to {loss:g}, its running mean is {done.scalars['mean-loss']:g}, {rate}"
    name, value = ("loss", loss) if not math.isfinite(loss) else ("gradient norm", norm)
    return f"the {name} is {value} {rate}"


def _remedy(config: Config, last_checkpoint: int | None) -> str:
    where = RunDirectory(Path(config.output_dir)).checkpoints(config.checkpoint)
    saved = "none was saved" if last_checkpoint is None else f"step {last_checkpoint} in {where}"
    return (
        f"last good checkpoint: {saved}; lower optim.lr, lengthen the warm-up, look at the data of that step, or set "
        "health.policy=skip or rollback"
    )
