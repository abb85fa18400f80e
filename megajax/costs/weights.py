"""Weights of a model and of a device, counted among the model's own parameters under the rule table.

No array is made: `jax.eval_shape` finds the parameters of a model, once for all sizes of the vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import cache, lru_cache
from math import prod
from typing import Literal, NamedTuple

import jax
from jax.sharding import AbstractMesh, AxisType

from megajax.config import Config, InputError, ModelConfig
from megajax.config.parallel import AXES, ParallelConfig
from megajax.models.families import build_model
from megajax.models.parameters import logical_axes, named_leaves, roles
from megajax.parallel.rules import Rules

MOMENTS = {"adamw": 2, "muon": 2, "lion": 1, "sgd": 1}
"""Optimizer -> numbers that it keeps per weight (muon: one per weight of a matrix)."""


class Leaf(NamedTuple):
    """A parameter of a model, without its values."""

    name: str
    axes: tuple[str, ...]
    """Logical axes of the parameter."""
    role: str
    row: int
    """Numbers in the parameter, or in one row of it if one of its axes is "vocab"."""

    def size(self, vocabulary: int) -> int:
        """Return the count of numbers in the parameter, given the rows of the vocabulary."""
        return self.row * (vocabulary if "vocab" in self.axes else 1)


class Counts(NamedTuple):
    """The numbers that one device holds, by purpose."""

    at_rest: float
    """Weights that are held between steps."""
    moments: float
    """Numbers of the optimizer state that are held between steps."""
    step: float
    """Weights that are held during a step, after ZeRO-1 has gathered them over `data`."""
    blocks: float
    """Weights of the blocks during a step."""
    layer: float
    """Weights of one layer, gathered over `fsdp` (t5: of the decoder)."""
    experts: float
    """Weights of the experts in a layer, gathered over `fsdp`."""


def model_leaves(model: ModelConfig) -> tuple[Leaf, ...]:
    """Return all parameters of a model; models that differ only in their vocabulary share one trace."""
    return _leaves(replace(model, vocab_size=1, vocab_multiple=1))


def parameter_count(model: ModelConfig, *, padded: bool = False) -> int:
    """Return the number of parameters; `padded` includes the vocabulary's padding rows, which exist but are not used.

    Raises:
        InputError: the vocabulary is not known yet.
    """
    if model.vocab_size is None:
        raise InputError("model.vocab_size is not set: the number of parameters depends on it")
    vocabulary = model.padded_vocab_size if padded else model.vocab_size
    return sum(leaf.size(vocabulary) for leaf in model_leaves(model))


class LayerWeights(NamedTuple):
    """The weights of one layer by the mesh axes that cut them."""

    attention: float
    """Weights of attention and norms, cut over `tensor` unless heads are whole.

    Norms are too small to be counted apart.
    """
    mlp: float
    """Weights of the MLP, in a mixture of the shared one, cut over `tensor`."""
    experts: float
    """Weights of the experts, cut over `expert` and `tensor`."""
    whole: float
    """Weights of router and shared MLP's gate, which are not cut."""

    def replicated_over_expert(self, tensor: int, whole_heads: bool) -> float:
        """Return the number of weights that are the same on all devices along `expert`: all but the experts."""
        return self.attention / (1 if whole_heads else tensor) + self.mlp / tensor + self.whole

    def on_device(self, tensor: int, expert: int, whole_heads: bool) -> float:
        """Return the number of weights of the layer with which a device computes."""
        return self.replicated_over_expert(tensor, whole_heads) + self.experts / (expert * tensor)


def require_one_kind(model: ModelConfig) -> None:
    """Refuse a model whose layers differ in what they hold, because costs are those of one layer times their number.

    Raises:
        InputError: the layers differ; the message names the key.
    """
    if model.dense_layers:
        raise InputError(
            f"model.dense_layers {model.dense_layers}: costs are known of mixtures whose layers all have experts; plan "
            "or explain it with 0"
        )


@cache
def layer_weights(model: ModelConfig, *, crossed: bool = False) -> LayerWeights:
    """Return the weights of one layer; with `crossed`, of one that attends to an encoder as well.

    Raises:
        InputError: layers differ in what they hold.
    """
    require_one_kind(model)
    sums = dict.fromkeys(LayerWeights._fields, 0)
    for leaf in model_leaves(model):
        stack, _, name = leaf.name.partition(".")
        if stack == "blocks" and (crossed or not name.startswith("cross")):
            sums[_kind(name, leaf.axes)] += leaf.row
    return LayerWeights(**{kind: size / model.num_layers for kind, size in sums.items()})


def _kind(name: str, axes: tuple[str, ...]) -> str:
    """Return the field of LayerWeights to which a parameter of a layer belongs."""
    if not name.startswith("mlp."):
        return "attention"
    if name in ("mlp.router", "mlp.shared_gate"):
        return "whole"
    return "experts" if "experts" in axes else "mlp"


@cache
def table_parameters(model: ModelConfig) -> int:
    """Return the number of weights in embedding and head, padding rows included."""
    tables = ("word_embedding", "head")
    return sum(leaf.size(model.padded_vocab_size) for leaf in model_leaves(model) if leaf.name in tables)


def count_weights(config: Config, mesh: Mapping[str, int]) -> Counts:
    """Count the weights and the optimizer state of a device.

    Args:
        config: configuration with a known vocabulary.
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
        size = leaf.size(model.padded_vocab_size)
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
