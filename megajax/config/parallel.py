"""How many devices each mesh axis takes."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Literal

from pydantic import NonNegativeInt, PositiveInt

from megajax.config.base import component
from megajax.config.model import ModelConfig

AXES = ("pipe", "data", "fsdp", "expert", "context", "tensor")
"""Mesh axes, slowest to fastest: the first six fields of ParallelConfig."""
REPLICAS = ("data", "fsdp", "expert")
"""Axes that every sample of a batch lies on one place of."""


def fit_vocabulary(model: ModelConfig, parallel: ParallelConfig) -> ModelConfig:
    """Pad the vocabulary so that every stage and tensor shard holds the same number of rows.

    Padding rows take part in nothing: loss, gradients and checkpoints do not depend on their number.
    """
    return replace(model, vocab_multiple=math.lcm(model.vocab_multiple, parallel.pipe * parallel.tensor))


@component
class ParallelConfig:
    """Sizes of the mesh axes, slowest to fastest: pipe, data, fsdp, expert, context, tensor."""

    pipe: PositiveInt = 1
    """Pipeline stages."""
    chunks: PositiveInt = 1
    """Chunks of layers per pipeline stage (Megatron: virtual stages); more than 1 interleaves, for a smaller bubble."""
    data: PositiveInt | Literal["auto"] = "auto"
    """Replicas of the model; auto = the devices that the other axes leave."""
    fsdp: PositiveInt = 1
    """Ways the batch and every weight are sharded, weights gathered layer by layer (ZeRO-3)."""
    expert: PositiveInt = 1
    """Ways the experts of a mixture are sharded."""
    context: PositiveInt = 1
    """Ways the sequence is sharded in attention."""
    tensor: PositiveInt = 1
    """Ways heads, MLP and vocabulary are sharded (Megatron tensor parallelism)."""
    zero: Literal[0, 1] = 0
    """1 = master weights and optimizer state are split over data as well (ZeRO-1): gradients are reduce-scattered, and
    the weights gathered once a step in the compute dtype."""
    whole_heads: bool = False
    """Every tensor shard computes all of the attention, for models whose heads do not divide over tensor."""
    sequence_parallel: bool = True
    """Shard the residual stream, norms and dropout along the sequence over tensor as well."""
    simulate_devices: NonNegativeInt = 0
    """Run on this many simulated CPU devices instead of the real ones; 0 = off."""

    @property
    def sizes(self) -> dict[str, int]:
        """Size of every mesh axis; `data` is a number where no devices are left to be counted."""
        return {axis: getattr(self, axis) for axis in AXES}
