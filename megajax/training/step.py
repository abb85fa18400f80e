"""The training step: loss, gradients, update, as one jitted function of (state, batch).

The loss is the sum of token losses divided by the number of unmasked tokens of the global batch, whatever the layout
and the accumulation. Gradients and optimizer are fp32; under bf16 and fp16 the forward and backward pass run on a copy
of the weights that is cast once a step.

Shapes: M microbatches, B samples of a microbatch over all replicas, S sequence.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import lru_cache
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from megajax.config.config import Config
from megajax.models.losses import Losses, objective
from megajax.models.model import Batch
from megajax.models.parameters import cast
from megajax.observe.memory import planned_bytes
from megajax.parallel.rules import Rules
from megajax.parallel.run import Runner
from megajax.processes import in_turn
from megajax.training.batches import batch_shardings
from megajax.training.health import Health, is_spike, update_health
from megajax.training.loss_scale import update_loss_scale
from megajax.training.optimizer import apply_update, clip_by_global_norm, global_norm
from megajax.training.schedule import Schedule, learning_rate
from megajax.training.state import TrainState, init_state, optimizer_for, scaling

DTYPES = {"fp32": jnp.float32, "bf16": jnp.bfloat16, "fp16": jnp.float16}
Metrics = dict[str, jax.Array]


def weighted(batch: Batch, scale: jax.Array | float = 1.0) -> tuple[Batch, dict[str, jax.Array]]:
    """Add the weights of its losses to a batch; return it with the number of tokens or samples of each loss, by name.

    With "weights" [M, B, S] a sum over tokens is their mean times `scale`; "sample_weights" [M, B] do the same for
    samples that have a label.
    """
    tokens = batch["loss_mask"].sum()
    counts = {"lm loss": tokens}
    # The weights include scale and mean, so that no fp16 cotangent is ever unscaled.
    batch = {**batch, "weights": batch["loss_mask"] * (scale / jnp.maximum(tokens, 1))}
    if "pair_labels" in batch:
        labelled = (batch["pair_labels"] >= 0).astype(jnp.float32)
        counts["sop loss"] = labelled.sum()
        batch["sample_weights"] = labelled * (scale / jnp.maximum(counts["sop loss"], 1))
    return batch, counts


@lru_cache(maxsize=1)  # run, training step and evaluation all ask; tracing the model takes half a second
def build_init(config: Config, rules: Rules) -> tuple[Callable[[jax.Array], TrainState], TrainState, TrainState]:
    """Return the jitted initialiser of the train state, and the shapes and shardings of its result."""
    optimizer = optimizer_for(config.optim, config.model)
    init = lambda key: init_state(key, config, optimizer)  # noqa: E731
    abstract = jax.eval_shape(init, jax.random.key(0))
    shardings = rules.shardings(abstract)
    return jax.jit(init, out_shardings=shardings), abstract, shardings


def build_train_step(
    config: Config, rules: Rules, schedule: Schedule, attention: str
) -> Callable[[TrainState, Batch], tuple[TrainState, Metrics]]:
    """Jit the training step, which takes over the memory of the state (donation).

    A step that must not count leaves parameters, moments, counts and schedule untouched, and reports `skipped`: after
    an fp16 overflow, without a single unmasked token, or if `training.health` calls it bad.

    Metrics are fp32 scalars under Megatron-LM's names: "lm loss" (mean over tokens) and the model's other losses ("sop
    loss", "load_balancing_loss", "z_loss", before their factors), "learning-rate", "grad-norm"
    (before clipping), "loss-scale", with `log.params_norm` "params-norm"; and "tokens", "skipped", "skips-at-minimum",
    "mean-loss" (the running mean that judged the step), "bad-steps" (in a row, this one included; 0 if it was not bad).
    """
    optimizer = optimizer_for(config.optim, config.model)
    loss_scale = scaling(config.loss_scale, config.train.precision)
    dropout = config.model.hidden_dropout > 0 or config.model.attention_dropout > 0
    runner = Runner(
        rules, attention, config.train.remat, config.train.seed if dropout else None, config.parallel.chunks
    )

    def step(state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
        scale = state.loss_scale.scale
        batch, counts = weighted(batch, scale)
        model = cast(state.params, DTYPES[config.train.precision])
        # The cast copy is sharded as the master weights are, so that ZeRO-1 gathers it, and not them, over `data`.
        model = jax.lax.with_sharding_constraint(model, rules.shardings(model))
        losses, gradients = runner.losses_and_gradients(model, batch, state.step)
        losses, gradients = jax.tree.map(lambda x: x / scale, (losses, gradients))
        gradients, norm = clip_by_global_norm(gradients, config.optim.clip_grad)
        tokens, lr = counts["lm loss"], learning_rate(state.samples, schedule)
        verdict = judged(state.health, losses, norm, tokens, config)
        params, opt_state = apply_update(state.params, state.opt_state, gradients, lr, optimizer, verdict.skip)
        samples = batch["sample_ids"].size
        new_state = TrainState(
            step=state.step + 1,
            samples=state.samples + jnp.where(verdict.skip, 0, samples),
            params=params,
            opt_state=opt_state,
            loss_scale=update_loss_scale(state.loss_scale, verdict.overflow, loss_scale),
            health=update_health(state.health, losses["lm loss"], ~verdict.skip, verdict.bad, config.health),
        )
        metrics = losses | {"tokens": tokens, "grad-norm": norm, "learning-rate": lr, "loss-scale": scale}
        if config.log.params_norm:
            metrics["params-norm"] = global_norm(params)
        return new_state, metrics | verdict_metrics(verdict, state, new_state)

    _, _, shardings = build_init(config, rules)
    replicated = NamedSharding(rules.mesh, PartitionSpec())
    return jax.jit(
        step,
        in_shardings=(shardings, batch_shardings(rules, config.model, config.data)),
        out_shardings=(shardings, replicated),
        donate_argnums=(0,),
    )


class Verdict(NamedTuple):
    """Tell how a step went, in three flags."""

    overflow: jax.Array
    """Whether the gradient or the loss is not finite."""
    skip: jax.Array
    """Whether the step must not count."""
    bad: jax.Array
    """Whether the step is bad (see `training.health`)."""


def judged(health: Health, losses: Losses, norm: jax.Array, tokens: jax.Array, config: Config) -> Verdict:
    """Judge a step by its losses, the norm of its gradient and the number of its unmasked tokens."""
    overflow = ~(jnp.isfinite(norm) & jnp.isfinite(objective(losses, config.model)))
    spike = is_spike(health, losses["lm loss"], config.health)
    # An fp16 overflow concerns the loss scale, and is not a bad step.
    bad = spike | (overflow & (config.train.precision != "fp16"))
    return Verdict(overflow, overflow | spike | (tokens == 0), bad)


def verdict_metrics(verdict: Verdict, before: TrainState, after: TrainState) -> Metrics:
    """Return the metrics on the verdict of a step between two states (see `build_train_step`)."""
    return {
        "skipped": verdict.skip.astype(jnp.float32),
        "skips-at-minimum": after.loss_scale.skips_at_minimum.astype(jnp.float32),
        "mean-loss": before.health.mean_loss,
        "bad-steps": jnp.where(verdict.bad, after.health.bad_in_a_row, 0).astype(jnp.float32),
    }


class CompiledStep:
    """Compile the train step, f(state, batch) -> (state, metrics), for every batch size at its first batch."""

    def __init__(self, step: Any, compiling: Callable[[], AbstractContextManager[None]]) -> None:
        """Compile within `compiling()`, a context that lasts as long as a compilation."""
        self._step, self._compiling = step, compiling
        self._compiled: dict[tuple[int, ...], jax.stages.Compiled] = {}

    def __call__(self, state: TrainState, batch: Batch) -> tuple[TrainState, dict[str, jax.Array]]:
        """Take a step and return the new state and the metrics; the state is donated."""
        shape = batch["tokens"].shape
        if shape not in self._compiled:
            with self._compiling():
                self._compiled[shape] = self._step.lower(state, batch).compile()
        return in_turn(self._compiled[shape](state, batch))

    @property
    def sizes(self) -> int:
        """Return the number of batch sizes that were compiled."""
        return len(self._compiled)

    @property
    def planned_bytes(self) -> int:
        """Return the largest memory, in bytes, that XLA has planned on one device for a step."""
        return max(planned_bytes(compiled) for compiled in self._compiled.values())
