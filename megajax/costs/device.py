"""The work of one device in a step: its parts of batch, sequence, heads, layers and experts.

All costs are derived from these few facts, which follow from a configuration and the sizes of a mesh.

A stack consists of the layers that one scan runs, which are all layers of a decoder or of BERT. T5 has two stacks, and
the second attends to the output of the first.

The load of a mixture is assumed to be balanced: each expert has T k / E of the T k assignments that a device's experts
see together. They are computed in whole blocks of `models.experts.block_rows` rows: ceil(T k / E R) blocks for an
expert. The real choices of a router change the time of a step, but neither traffic nor memory.

Letters: B samples of a micro batch, S sequence, T = B S / context tokens of a device (for experts: of all devices along
`expert`), N heads, K kv heads, L layers, k experts per token, E experts, R rows of a block; P stages, v chunks per
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
    """Derive the work of a device of a mesh, which stands for every device of its pipeline stage."""

    config: Config
    """Configuration of the training, whose mesh sizes are ignored in favour of `mesh`."""
    mesh: Mapping[str, int]
    """Size of every axis of the mesh."""

    @classmethod
    def of(cls, config: Config) -> Device:
        """Return a device of the configuration's mesh, whose sizes have to be numbers."""
        return cls(config, config.parallel.sizes)

    @property
    def samples(self) -> int:
        """Return the number of samples of a global batch on this device, which devices along other axes share."""
        return self.config.train.global_batch_size // math.prod(self.mesh[axis] for axis in REPLICAS)

    @property
    def microbatches(self) -> int:
        """Return the number M of microbatches in a global batch."""
        return self.samples // self.config.train.micro_batch_size

    def tokens(self, sequence: int) -> float:
        """Return the number T of tokens in a micro batch of samples of S tokens."""
        return self.config.train.micro_batch_size * sequence / self.mesh["context"]

    @property
    def width(self) -> int:
        """Return the bytes of a number in the forward and backward passes."""
        return 4 if self.config.train.precision == "fp32" else 2

    @property
    def head_ways(self) -> int:
        """Return the number of parts into which heads are cut over `tensor`."""
        return 1 if self.config.parallel.whole_heads else self.mesh["tensor"]

    @property
    def heads(self) -> float:
        """Return the number N of query heads on this device."""
        return self.config.model.num_heads / self.head_ways

    @property
    def kv_heads(self) -> float:
        """Return the number K of key/value heads on this device."""
        return self.config.model.kv_heads / self.head_ways

    @property
    def stream_ways(self) -> int:
        """Return the number of parts into which the residual stream is cut over `tensor`."""
        return self.mesh["tensor"] if self.config.parallel.sequence_parallel else 1

    def stream(self, sequence: int) -> float:
        """Return the bytes of a micro batch's residual stream [T, D] for samples of S tokens, uncut over `tensor`."""
        return self.width * self.tokens(sequence) * self.config.model.hidden_size

    @property
    def stacks(self) -> tuple[Stack, ...]:
        """Return the stacks of layers in the order in which they run; a pipeline cuts the last one."""
        model, data = self.config.model, self.config.data
        return model_class(model).stacks(model, data.seq_length, data.decoder_seq_length)

    @property
    def layers(self) -> int:
        """Return the number of layers in the fullest stage.

        If they do not divide (Megatron-LM), the last and the first stage have one layer less.
        """
        chunks = self.config.parallel.chunks
        return math.ceil(self.config.model.num_layers / (self.mesh["pipe"] * chunks)) * chunks

    @property
    def schedule(self) -> Interleaved1F1B:
        """Return the schedule of the pipeline."""
        return Interleaved1F1B(self.mesh["pipe"], self.config.parallel.chunks, self.microbatches)

    def stride(self, axis: str) -> int:
        """Return the distance, in devices, from one member of a group over `axis` to the next."""
        return math.prod(self.mesh[inner] for inner in AXES[AXES.index(axis) + 1 :])

    @property
    def load(self) -> Load | None:
        """Return the work of each expert for a microbatch, or None if the model is not a mixture."""
        if not self.config.model.experts:
            return None
        return expert_load(self.config.model, self.tokens(self.stacks[-1].sequence) * self.mesh["expert"])


class Load(NamedTuple):
    """The work of each expert of a mixture for a microbatch, in every layer."""

    tokens: float
    """Number of assignments of an expert, T k / E."""
    blocks: int
    """Number of blocks that an expert works through; the last one may be half empty."""
    block_rows: int
    """Number of rows R in a block."""

    def __str__(self) -> str:
        """Return the load in words."""
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
    """Return the number of [D, D] matrices beside the tables, which are whole on every device.

    They are BERT's transform and its pooler.
    """
    return model_class(model).head_transform + model.pair_task


def lookups(model: ModelConfig) -> int:
    """Return how often a microbatch is looked up in the embedding: twice with encoder and decoder, else once."""
    return 1 + model.is_encoder_decoder


def lookups_again(model: ModelConfig, stages: int) -> int:
    """Return how often the backward pass looks a microbatch up again.

    A pipeline keeps nothing of the embedding. The gradient of a lookup needs no saved array, but a norm after it needs
    its input.
    """
    return int(model.embedding_norm and stages > 1)
