"""The work of one device in a step: its part of the batch, of the sequence, of the heads, layers and experts.

All costs are derived from these few facts. A configuration says what is trained, a mesh on how many devices.

A stack is what one scan runs: all layers of a decoder or of BERT; T5 has two, of which the second looks at what the
first one made.

The load of a mixture is taken to be balanced: of the T k assignments that a device's experts see together, T k / E are
each expert's. They are worked through in whole blocks of `models.experts.block_rows`, so that an expert computes
ceil(T k / E R) R rows. What a router really chooses changes the time of a step, but nothing that is sent or held.

Letters: B samples of a micro batch, S sequence, T = B S / context tokens of a device (of experts: of all devices along
`expert`), N heads, K kv heads, L layers, k experts of a token, E experts, R rows of a block; P stages, v chunks per
stage, M microbatches.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from megajax.config.config import Config
from megajax.config.model import ModelConfig
from megajax.config.parallel import AXES, REPLICAS
from megajax.models.experts import block_rows
from megajax.models.families import model_class
from megajax.models.model import Stack
from megajax.parallel.pipeline.schedule import Interleaved1F1B


@dataclass(frozen=True)
class Device:
    """One device of a mesh, as every other one of its pipeline stage."""

    config: Config
    """Its mesh sizes do not count, those of `mesh` do."""
    mesh: Mapping[str, int]
    """Size of every axis."""

    @classmethod
    def of(cls, config: Config) -> Device:
        """Return a device of the mesh that the configuration itself gives, in numbers."""
        return cls(config, config.parallel.sizes)

    @property
    def samples(self) -> int:
        """Samples of a global batch that this device sees; devices along the other axes see the same ones."""
        return self.config.train.global_batch_size // math.prod(self.mesh[axis] for axis in REPLICAS)

    @property
    def microbatches(self) -> int:
        """M, the microbatches of a global batch."""
        return self.samples // self.config.train.micro_batch_size

    def tokens(self, sequence: int) -> float:
        """T, the tokens of a micro batch of samples of S tokens."""
        return self.config.train.micro_batch_size * sequence / self.mesh["context"]

    @property
    def width(self) -> int:
        """Bytes of a number in the forward and backward pass."""
        return 4 if self.config.train.precision == "fp32" else 2

    @property
    def head_ways(self) -> int:
        """Ways that heads are cut over `tensor`."""
        return 1 if self.config.parallel.whole_heads else self.mesh["tensor"]

    @property
    def heads(self) -> float:
        """N of this device."""
        return self.config.model.num_heads / self.head_ways

    @property
    def kv_heads(self) -> float:
        """K of this device."""
        return self.config.model.kv_heads / self.head_ways

    @property
    def stream_ways(self) -> int:
        """Ways that the residual stream is cut over `tensor`."""
        return self.mesh["tensor"] if self.config.parallel.sequence_parallel else 1

    def stream(self, sequence: int) -> float:
        """Bytes of the residual stream [T, D] of a micro batch of samples of S tokens, whole over `tensor`."""
        return self.width * self.tokens(sequence) * self.config.model.hidden_size

    @property
    def stacks(self) -> tuple[Stack, ...]:
        """Stacks of layers, in the order in which they run; a pipeline cuts the last one."""
        return model_class(self.config.model).stacks(self.config.model, self.config.data)

    @property
    def layers(self) -> int:
        """Layers of the fullest stage; where they do not divide (Megatron-LM), the last and the first have one less."""
        chunks = self.config.parallel.chunks
        return math.ceil(self.config.model.num_layers / (self.mesh["pipe"] * chunks)) * chunks

    @property
    def schedule(self) -> Interleaved1F1B:
        """The schedule of the pipeline: which stage works on which microbatch, and when."""
        return Interleaved1F1B(self.mesh["pipe"], self.config.parallel.chunks, self.microbatches)

    def stride(self, axis: str) -> int:
        """Count the devices from one member of a group over `axis` to the next."""
        return math.prod(self.mesh[inner] for inner in AXES[AXES.index(axis) + 1 :])

    @property
    def load(self) -> Load | None:
        """The work of each expert for a microbatch; None = the model is no mixture."""
        if not self.config.model.experts:
            return None
        return expert_load(self.config.model, self.tokens(self.stacks[-1].sequence) * self.mesh["expert"])


class Load(NamedTuple):
    """The work of each expert of a mixture for a microbatch, in every layer."""

    tokens: float
    """Assignments of an expert, T k / E."""
    blocks: int
    """Blocks that it works through, the last one perhaps half empty."""
    block_rows: int
    """R."""

    def __str__(self) -> str:
        """Say it in words."""
        rows = self.blocks * self.block_rows
        return (
            f"balanced load: {self.tokens:,.0f} tokens each in a microbatch, computed in {self.blocks} blocks of "
            f"{self.block_rows} rows ({rows / self.tokens - 1:.0%} padding); forward once more in the backward pass, "
            "whatever train.remat is"
        )


def expert_load(model: ModelConfig, tokens: float) -> Load:
    """Return the load of an expert, given the tokens T of all devices along `expert`."""
    rows, mean = block_rows(int(tokens), model), tokens * model.experts_per_token / model.experts
    return Load(mean, math.ceil(mean / rows), rows)


def head_matrices(model: ModelConfig) -> int:
    """Count the [D, D] matrices beside the tables, which every device has whole: BERT's transform, and its pooler."""
    return model_class(model).head_matrices(model)


def lookups(model: ModelConfig) -> int:
    """Count how often a microbatch is looked up in the embedding: by an encoder and by a decoder."""
    return 2 if model_class(model).writes == "answer" else 1


def lookups_again(model: ModelConfig, stages: int) -> int:
    """Count how often the backward pass looks a microbatch up again.

    A pipeline keeps nothing of the embedding. Lookups alone need nothing for their gradient; a norm behind them needs
    its input.
    """
    return int(model.embedding_norm and stages > 1)
