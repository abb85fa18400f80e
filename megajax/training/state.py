"""Train state: everything that a training step changes, as one pytree, and its form in checkpoints.

Checkpoints hold the weights of all layers in one stack [L, ...], whatever the pipeline. An interleaved pipeline keeps
them as [chunks, L / chunks, ...], cut over `pipe` in the second dimension. Conversion between the two is a reshape of
every stacked array and an exchange over `pipe`, once per save or restore.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from megajax.config.config import Config
from megajax.config.model import ModelConfig
from megajax.config.train import LossScaleConfig, OptimConfig
from megajax.models.families import build_model
from megajax.models.model import Model
from megajax.models.parameters import annotate, join_layers, roles, split_layers
from megajax.parallel.rules import Rules
from megajax.processes import in_turn
from megajax.training.health import Health, init_health
from megajax.training.loss_scale import LossScale, init_loss_scale
from megajax.training.optimizer import build_optimizer


class TrainState(NamedTuple):
    """The arrays of a checkpoint."""

    step: jax.Array
    """int32, number of steps taken, skipped ones included."""
    samples: jax.Array
    """int32, samples consumed by steps that were not skipped; the learning rate is a function of this."""
    params: Model
    """fp32 master weights."""
    opt_state: Any
    """Moments and counts of the optimizer."""
    loss_scale: LossScale
    """State of the fp16 loss scaler; constant 1 in other precisions."""
    health: Health
    """Running mean of the loss, and bad steps in a row."""


def init_state(key: jax.Array, config: Config, optimizer: optax.GradientTransformation) -> TrainState:
    """Draw the state before the first step as a pure function of (key, config), with the same bits on every layout."""
    params = split_layers(build_model(key, config.model), config.parallel.chunks)
    return TrainState(
        step=jnp.int32(0),
        samples=jnp.int32(0),
        params=params,
        opt_state=optimizer.init(params),
        loss_scale=init_loss_scale(scaling(config.loss_scale, config.train.precision)),
        health=init_health(),
    )


def scaling(loss_scale: LossScaleConfig, precision: str) -> LossScaleConfig:
    """Return the configured loss scaling under fp16, and a constant scale of 1 in other precisions."""
    return loss_scale if precision == "fp16" else LossScaleConfig(constant=1.0)


def optimizer_for(optim: OptimConfig, model: ModelConfig) -> optax.GradientTransformation:
    """Build the update rule from the role and the axes of every parameter of the model."""
    abstract = jax.eval_shape(lambda key: build_model(key, model), jax.random.key(0))
    axes = annotate(abstract, lambda _, param: param.get_metadata()["axes"])
    return build_optimizer(optim, roles(abstract), axes)


class CanonicalForm:
    """Convert a state to the form of checkpoints and back; with one chunk per stage both forms are the same."""

    def __init__(self, abstract: TrainState, shardings: TrainState, rules: Rules, chunks: int) -> None:
        """Prepare both conversions; `abstract` and `shardings` describe the state as the training step holds it."""
        self.interleaved = chunks > 1
        self.abstract = jax.eval_shape(join_layers, abstract) if self.interleaved else abstract
        self.shardings = rules.shardings(self.abstract)
        self._join = jax.jit(join_layers, out_shardings=self.shardings)
        self._split = jax.jit(lambda state: split_layers(state, chunks), out_shardings=shardings, donate_argnums=0)

    def of(self, state: TrainState) -> TrainState:
        """Convert a state to the form of checkpoints."""
        return in_turn(self._join(state)) if self.interleaved else state

    def back(self, state: TrainState) -> TrainState:
        """Convert a state to the form of the training step."""
        return in_turn(self._split(state)) if self.interleaved else state
