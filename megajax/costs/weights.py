"""How many weights a device holds: the model's own parameters under the rule table, without any array."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache
from math import prod
from typing import Literal, NamedTuple

import jax
from jax.sharding import AbstractMesh, AxisType

from megajax.config import Config, ModelConfig
from megajax.config.parallel import AXES, ParallelConfig
from megajax.models.families import build_model
from megajax.models.parameters import logical_axes, named_leaves, roles
from megajax.parallel.rules import Rules

MOMENTS = {"adamw": 2, "muon": 2, "lion": 1, "sgd": 1}
"""Numbers that an optimizer keeps per weight (muon: one for those of a matrix)."""


class Leaf(NamedTuple):
    """One parameter of a model."""

    name: str
    axes: tuple[str, ...]
    """Logical axes."""
    role: str
    size: int
    """Numbers in it; if one of its axes is "vocab", in a row of it."""


class Counts(NamedTuple):
    """Numbers that one device holds."""

    at_rest: float
    """Weights between steps."""
    moments: float
    """Optimizer state between steps."""
    step: float
    """Weights during a step: ZeRO-1 gathers them over `data`."""
    blocks: float
    """Those of the blocks."""
    layer: float
    """Weights of one layer, gathered over `fsdp` (t5: of the decoder)."""
    experts: float
    """Those of them that are a mixture's experts."""


def model_leaves(model: ModelConfig) -> tuple[Leaf, ...]:
    """All parameters of a model; whatever its vocabulary, they are found once."""
    return _leaves(replace(model, vocab_size=1, vocab_multiple=1))


def count_weights(config: Config, mesh: Mapping[str, int]) -> Counts:
    """Weights and optimizer state of a device.

    Args:
        config: with a known vocabulary.
        mesh: size of every axis.
    """
    parallel, sizes = config.parallel, tuple(mesh[axis] for axis in AXES)
    return _count(config.model, sizes, parallel.whole_heads, parallel.zero, config.optim.name)


@lru_cache(maxsize=2**14)  # a search asks for every micro batch and recomputation
def _count(
    model: ModelConfig, sizes: tuple[int, ...], whole_heads: bool, zero: Literal[0, 1], optimizer: str
) -> Counts:
    abstract = AbstractMesh(sizes, AXES, axis_types=(AxisType.Auto,) * len(AXES))
    rules = Rules.of(abstract, ParallelConfig(whole_heads=whole_heads, zero=zero), model)
    at_rest = moments = step = blocks = layers = experts = 0.0
    for leaf in model_leaves(model):
        size = leaf.size * (model.padded_vocab_size if "vocab" in leaf.axes else 1)
        named = [rules.rule(axis) for axis in leaf.axes]
        cuts = {axis for rule in named for axis in rule.at_rest}
        here, during = size / rules.size(*cuts), size / rules.size(*cuts - {"data"})
        at_rest += here
        moments += here * (1 if optimizer == "muon" and leaf.role == "matrix" else MOMENTS[optimizer])
        step += during
        if "layers" in leaf.axes:
            blocks += during
            gathered = size / rules.size(*cuts - {"data", "fsdp"})
            layers += gathered * leaf.name.startswith("blocks.")
            experts += gathered * ("experts" in leaf.axes)
    here = model.num_layers / sizes[AXES.index("pipe")]  # layers of a stage
    return Counts(at_rest, moments, step, blocks, layers / here, experts / here)


@lru_cache(maxsize=32)
def _leaves(model: ModelConfig) -> tuple[Leaf, ...]:
    weights = jax.eval_shape(lambda: build_model(jax.random.key(0), model))
    leaves = zip(named_leaves(weights), jax.tree.leaves(roles(weights)), strict=True)
    return tuple(Leaf(name, tuple(filter(None, logical_axes(x))), role, prod(x.shape)) for (name, x), role in leaves)
