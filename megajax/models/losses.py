"""Objective of training: a few named terms, and their sum with factors."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from megajax.config.model import ModelConfig

Losses = dict[str, jax.Array]
"""Terms of the loss by Megatron-LM's names in logs, each a weighted sum, fp32 scalar."""

BESIDES = ("sop loss", "load_balancing_loss", "z_loss")
"""Names of the terms that a model may have besides "lm loss"."""


def coefficients(config: ModelConfig) -> dict[str, float]:
    """Return the factor of every term that a model may have."""
    return {"lm loss": 1.0, "sop loss": 1.0, "load_balancing_loss": config.balance_loss, "z_loss": config.z_loss}


def add(a: Losses, b: Losses) -> Losses:
    """Add up two sets of terms; a missing term counts as 0."""
    return {name: a.get(name, 0) + jnp.asarray(b.get(name, 0)) for name in {**a, **b}}


def objective(losses: Losses, config: ModelConfig) -> jax.Array:
    """Return the objective, whose gradient is taken: the sum of factor x term."""
    factors = coefficients(config)
    return sum((factors[name] * loss for name, loss in losses.items()), start=jnp.float32(0))
