"""Imported runs: their weights, and the results of our models for a batch."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import SingleDeviceSharding

from megajax.checkpoint.store import Checkpoints
from megajax.config import ModelConfig
from megajax.models.families import build_model
from megajax.models.layout import Layout
from megajax.models.model import Model
from megajax.models.parameters import annotate, logical_axes
from megajax.training.run_directory import RunDirectory


def imported_model(run_dir: Path) -> Model:
    """The fp32 model of a run, with rows of padding behind its vocabulary."""
    run, config = RunDirectory.open(run_dir)
    like = jax.eval_shape(lambda: build_model(jax.random.key(0), replace(config.model, vocab_multiple=64)))
    device = SingleDeviceSharding(jax.devices()[0])
    with Checkpoints(run.checkpoints(config.checkpoint), None) as checkpoints:
        return checkpoints.restore(like, jax.tree.map(lambda _: device, like), part="params").state


def trained(config: ModelConfig) -> Model:
    """A model whose parameters, biases included, have moved since they were drawn; the vocabulary's padding is zero."""
    rng = np.random.default_rng(0)

    def moved(_: str, leaf: Any) -> np.ndarray:
        values = leaf[...] + 0.3 * rng.standard_normal(leaf.shape, np.float32)
        return values.at[config.vocab_size :].set(0) if "vocab" in logical_axes(leaf) else values

    return annotate(build_model(jax.random.key(0), config), moved)


def in_layers(name: str, leaf: Any) -> np.ndarray:
    """A parameter layer by layer."""
    return np.asarray(leaf[...]) if "blocks." in name else np.asarray(leaf[...])[None]


def computed_here(model: Any, given: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """What our model makes of the inputs, by the names that transformers has for it."""
    batch = {name: jnp.asarray(value) for name, value in given.items()}
    if model.config.family != "gpt":
        batch["segment_ids"] = batch["padding"]
        batch["decoder_segment_ids"] = jnp.zeros_like(batch["decoder_tokens"])
    if model.config.token_types < 2:
        batch["token_types"] = jnp.zeros_like(batch["token_types"])

    @jax.jit
    def run(model: Any) -> dict[str, jax.Array]:
        hidden = model.hidden(batch, model.context(batch, Layout(), None))
        logits = model.logits(hidden)
        out = {"last_hidden_state": hidden, "logits": logits, "prediction_logits": logits}
        if model.config.pair_task:
            out["seq_relationship_logits"] = model.pair_logits(hidden, Layout())
        return out

    return jax.device_get(run(model))


def assert_same_outputs(theirs: Any, ours: Model) -> None:
    """All that a model of transformers computes, but for what stands at padding, within 1e-4 of the largest."""
    from tests.interop.references import computed, inputs

    given = inputs()
    here, padding = computed_here(ours, given), given["padding"]
    for output, expected in computed(theirs, given).items():
        real = padding == 0 if expected.shape[:2] == padding.shape else slice(None)
        np.testing.assert_allclose(here[output][real], expected[real], atol=1e-4 * np.abs(expected).max(), rtol=0)
