"""The layers of a model as the planner counts them: stacks, weights of a layer, work of its experts.

A stack is what one scan runs: all layers of a decoder or of BERT; T5 has two, of which the second looks at what the
first one made.

The load of a mixture is taken to be balanced: of the T k assignments that a device's experts see together, T k / E are
each expert's. They are worked through in whole blocks of `models.experts.block_rows`, so that an expert computes
ceil(T k / E R) R rows. What a router really chooses changes the time of a step, but nothing that is sent or held.

Letters: T tokens that a device's experts see (those of all devices along `expert`), k experts of a token, E experts, R
rows of a block.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from math import ceil
from typing import NamedTuple

from megajax.config.config import Config
from megajax.config.model import ModelConfig
from megajax.costs.sizes import parameter_counts
from megajax.models.experts import block_rows
from megajax.models.families import model_class
from megajax.models.model import Stack


def stacks(config: Config) -> tuple[Stack, ...]:
    """Return the stacks of a model, in the order in which they run; a pipeline cuts the last one."""
    return model_class(config.model).stacks(config.model, config.data)


class LayerWeights(NamedTuple):
    """Weights of one layer by what cuts them."""

    attention: float
    """Over `tensor`, unless heads are whole; norms included, which are too small to tell apart."""
    mlp: float
    """Over `tensor`: the MLP, of a mixture the shared one."""
    experts: float
    """Over `expert` and `tensor`."""
    whole: float
    """Over nothing: the router, and the gate of the shared MLP."""

    def replicated_over_expert(self, tensor: int, whole_heads: bool) -> float:
        """On a device, without its experts: what all devices along `expert` hold alike."""
        return self.attention / (1 if whole_heads else tensor) + self.mlp / tensor + self.whole

    def on_device(self, tensor: int, expert: int, whole_heads: bool) -> float:
        """All that a device computes with."""
        return self.replicated_over_expert(tensor, whole_heads) + self.experts / (expert * tensor)


@cache
def layer_weights(model: ModelConfig, *, crossed: bool = False) -> LayerWeights:
    """Those of one layer; `crossed` if it looks at an encoder as well."""
    counts = parameter_counts(model, padded=True)
    layer = lambda *names: sum(counts.get(name, 0) for name in names) / model.num_layers  # noqa: E731
    attention = layer("attention_norm", "qkv", "qk_norm", "attention_out", "mlp_norm")
    if crossed:
        attention += layer("cross_norm", "cross")
    if not model.experts:
        return LayerWeights(attention, layer("fc1", "fc2"), 0, 0)
    return LayerWeights(attention, layer("shared"), layer("fc1", "fc2"), layer("router", "shared_gate"))


@cache
def table_parameters(model: ModelConfig) -> int:
    """Weights of embedding and head."""
    counts = parameter_counts(model, padded=True)
    return counts["word_embedding"] + counts["head"]


def head_matrices(model: ModelConfig) -> int:
    """Count the [D, D] matrices beside the tables, which every device has whole: BERT's transform, and its pooler."""
    return model_class(model).head_matrices(model)


def lookups(model: ModelConfig) -> int:
    """Count how often a microbatch is looked up in the embedding: by an encoder and by a decoder."""
    return 2 if model_class(model).writes == "answer" else 1


def lookups_again(model: ModelConfig, stages: int) -> int:
    """Times that the backward pass looks a microbatch up again.

    A pipeline keeps nothing of the embedding. Lookups alone need nothing for their gradient; a norm behind them needs
    its input.
    """
    return int(model.embedding_norm and stages > 1)


class Load(NamedTuple):
    """What each expert of a mixture does for a microbatch, in every layer."""

    tokens: float
    """Assignments of an expert, T k / E."""
    blocks: int
    """That it works through, the last one perhaps half empty."""
    block_rows: int
    """R."""

    def __str__(self) -> str:
        """In words."""
        rows = self.blocks * self.block_rows
        return (
            f"balanced load: {self.tokens:,.0f} tokens each in a microbatch, computed in {self.blocks} blocks of "
            f"{self.block_rows} rows ({rows / self.tokens - 1:.0%} padding); forward once more in the backward pass, "
            "whatever train.remat is"
        )


def balanced_load(config: Config, mesh: Mapping[str, int]) -> Load | None:
    """That of a configuration on a mesh; None = it is no mixture."""
    model = config.model
    if not model.experts:
        return None
    return expert_load(model, config.train.micro_batch_size * config.data.seq_length * mesh["expert"] / mesh["context"])


def expert_load(model: ModelConfig, tokens: float) -> Load:
    """That of so many tokens T, of all devices along `expert`."""
    rows, mean = block_rows(int(tokens), model), tokens * model.experts_per_token / model.experts
    return Load(mean, ceil(mean / rows), rows)
