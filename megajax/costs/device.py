"""The work of one device in a step: its part of the batch, of the sequence, of the heads, layers and experts.

All costs are derived from these few facts. A configuration says what is trained, a mesh on how many devices.

A stack is the layers that one scan runs: all layers of a decoder or of BERT. T5 has two, of which the second attends to
the output of the first.

The load of a mixture is taken to be balanced: each expert has T k / E of the T k assignments that a device's experts
see together. They are computed in whole blocks of `models.experts.block_rows` rows: ceil(T k / E R) blocks for an
expert. The real choices of a router change the time of a step, but neither traffic nor memory.

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
    """Device of a mesh, which stands for every device of its pipeline stage."""

    config: Config
    """Configuration of the training, whose mesh sizes are ignored in favour of `mesh`."""
    mesh: Mapping[str, int]
    """Size of every axis of the mesh."""

    @classmethod
    def of(cls, config: Config) -> Device:
        """Return a device of the mesh that the configuration gives, whose sizes have to be numbers."""
        return cls(config, config.parallel.sizes)

    @property
    def samples(self) -> int:
        """Return the samples of a global batch that this device sees; devices along other axes see the same."""
        return self.config.train.global_batch_size // math.prod(self.mesh[axis] for axis in REPLICAS)

    @property
    def microbatches(self) -> int:
        """Return M, the microbatches of a global batch."""
        return self.samples // self.config.train.micro_batch_size

    def tokens(self, sequence: int) -> float:
        """Return T, the tokens of a micro batch of samples of S tokens."""
        return self.config.train.micro_batch_size * sequence / self.mesh["context"]

    @property
    def width(self) -> int:
        """Return the bytes of a number in the forward and backward pass."""
        return 4 if self.config.train.precision == "fp32" else 2

    @property
    def head_ways(self) -> int:
        """Return the number of parts into which heads are cut over `tensor`."""
        return 1 if self.config.parallel.whole_heads else self.mesh["tensor"]

    @property
    def heads(self) -> float:
        """Return N, the query heads of this device."""
        return self.config.model.num_heads / self.head_ways

    @property
    def kv_heads(self) -> float:
        """Return K, the key/value heads of this device."""
        return self.config.model.kv_heads / self.head_ways

    @property
    def stream_ways(self) -> int:
        """Return the number of parts into which the residual stream is cut over `tensor`."""
        return self.mesh["tensor"] if self.config.parallel.sequence_parallel else 1

    def stream(self, sequence: int) -> float:
        """Return the bytes of the residual stream [T, D] of a micro batch of samples of S tokens, uncut over
        `tensor`.
        """
        return self.width * self.tokens(sequence) * self.config.model.hidden_size

    @property
    def stacks(self) -> tuple[Stack, ...]:
        """Return the stacks of layers in the order in which they run; a pipeline cuts the last one."""
        model, data = self.config.model, self.config.data
        return model_class(model).stacks(model, data.seq_length, data.decoder_seq_length)

    @property
    def layers(self) -> int:
        """Return the layers of the fullest stage.

        Where they do not divide (Megatron-LM), the last and the first stage have one less.
        """
        chunks = self.config.parallel.chunks
        return math.ceil(self.config.model.num_layers / (self.mesh["pipe"] * chunks)) * chunks

    @property
    def schedule(self) -> Interleaved1F1B:
        """Return the schedule of the pipeline, which says when a stage works on which microbatch."""
        return Interleaved1F1B(self.mesh["pipe"], self.config.parallel.chunks, self.microbatches)

    def stride(self, axis: str) -> int:
        """Count the devices from one member of a group over `axis` to the next."""
        return math.prod(self.mesh[inner] for inner in AXES[AXES.index(axis) + 1 :])

    @property
    def load(self) -> Load | None:
        """Return the work of each expert for a microbatch, or None if the model is no mixture."""
        if not self.config.model.experts:
            return None
        return expert_load(self.config.model, self.tokens(self.stacks[-1].sequence) * self.mesh["expert"])


class Load(NamedTuple):
    """Work of each expert of a mixture for a microbatch, in every layer."""

    tokens: float
    """Assignments of an expert, T k / E."""
    blocks: int
    """Blocks that an expert works through, the last one perhaps half empty."""
    block_rows: int
    """Rows R of a block."""

    def __str__(self) -> str:
        """Describe the load in words."""
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
    return model_class(model).head_transform + model.pair_task


def lookups(model: ModelConfig) -> int:
    """Count how often a microbatch is looked up in the embedding: twice with encoder and decoder, else once."""
    return 1 + model.is_encoder_decoder


def lookups_again(model: ModelConfig, stages: int) -> int:
    """Count how often the backward pass looks a microbatch up again.

    A pipeline keeps nothing of the embedding. The gradient of a lookup needs no saved array; a norm after it needs its
    input.
    """
    return int(model.embedding_norm and stages > 1)
