"""The layers of a model as the planner counts them: stacks, lookups in the embedding, and the work of experts.

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
from math import ceil
from typing import NamedTuple

from megajax.config.config import Config
from megajax.config.model import ModelConfig
from megajax.models.experts import block_rows
from megajax.models.families import model_class
from megajax.models.model import Stack


def stacks(config: Config) -> tuple[Stack, ...]:
    """Return the stacks of a model, in the order in which they run; a pipeline cuts the last one."""
    return model_class(config.model).stacks(config.model, config.data)


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
