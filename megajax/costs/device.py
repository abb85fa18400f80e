"""What one device works on in a step: its part of the batch, of the sequence, of the heads and of the layers.

All costs are derived from these few facts. A configuration says what is trained, a mesh on how many devices.

Letters: B samples of a micro batch, S sequence, T = B S / context tokens of a device, N heads, K kv heads, L layers;
P stages, v chunks per stage, M microbatches.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from megajax.config.config import Config
from megajax.config.parallel import AXES, REPLICAS
from megajax.costs.stacks import stacks
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
        return stacks(self.config)

    @property
    def layers(self) -> int:
        """Layers of the fullest stage; where they do not divide (Megatron-LM), the last and the first have one less."""
        chunks = self.config.parallel.chunks
        return math.ceil(self.config.model.num_layers / (self.mesh["pipe"] * chunks)) * chunks

    @property
    def schedule(self) -> Interleaved1F1B:
        """What the stages of the pipeline do, and when."""
        return Interleaved1F1B(self.mesh["pipe"], self.config.parallel.chunks, self.microbatches)

    def stride(self, axis: str) -> int:
        """Count the devices from one member of a group over `axis` to the next."""
        return math.prod(self.mesh[inner] for inner in AXES[AXES.index(axis) + 1 :])
