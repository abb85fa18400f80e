"""Time of one operation on a GPU: matrix product, attention, memory traffic, collective.

Every class of operations reaches a share of its peak that is a constant of the GPU (`hardware.Speed`) times a smooth,
physical function of its shape. No constant belongs to a model, a layout or a program.

Shapes: a matrix product is [m, k] x [k, n].
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, fields
from typing import Literal

from megajax.config.base import InputError
from megajax.costs.hardware import Gpu

Numbers = Literal["fp8", "half", "fp32"]
WIDTH: dict[Numbers, int] = {"fp8": 1, "half": 2, "fp32": 4}
"""Numeric format -> bytes of an operand."""

TILE = 128 * 256
"""Entries of the product that a multiprocessor computes at a time (the largest tiles of cuBLAS)."""
DEPTH = 256
"""Length k at which a tile's products take as long as its start and end, during which the tensor cores wait."""
LAUNCH = 4e-6
"""Seconds between the last block of a kernel and the first of the next."""
HANDSHAKE = 15e-6
"""Seconds until all members of a collective have met, for each level of the network."""
DISTURBANCE = 0.25
"""Share of a collective's time by which it slows down a computation that it runs beside.

NCCL takes up to a quarter of the multiprocessors, and some memory bandwidth.
"""


def peak_flops(gpu: Gpu, numbers: Numbers) -> float:
    """Return the dense peak of matrix products, FLOP/s.

    Raises:
        InputError: the GPU has no fp8.
    """
    tflops = {"fp8": gpu.fp8_tflops, "half": gpu.half_tflops, "fp32": gpu.tf32_tflops}[numbers]
    if tflops is None:
        raise InputError(f"{gpu.name} has no {numbers}: plan for 16-bit matrix products, or another GPU")
    return 1e12 * tflops


def matmul_seconds(gpu: Gpu, m: float, k: float, n: float, numbers: Numbers = "half") -> float:
    """Return the seconds of a matrix product, whose result has 16 bits (fp32 from fp32).

    The last wave of tiles leaves half of the multiprocessors idle on average. If reading and writing the matrices takes
    longer, that is the time.
    """
    tiles = m * n / TILE
    full = tiles / (tiles + gpu.multiprocessors / 2) * k / (k + DEPTH)
    share = gpu.speed.matmul_fp8 if numbers == "fp8" else gpu.speed.matmul
    width = WIDTH[numbers]
    traffic = memory_seconds(gpu, width * (m * k + k * n) + max(width, 2) * m * n)
    return max(2 * m * k * n / (peak_flops(gpu, numbers) * share * full), traffic) + LAUNCH


def attention_seconds(gpu: Gpu, flops: float) -> float:
    """Return the seconds of fused (flash) attention, given the FLOPs of the scores that a causal mask keeps."""
    return flops / (peak_flops(gpu, "half") * gpu.speed.attention) + LAUNCH


def memory_seconds(gpu: Gpu, size: float) -> float:
    """Return the seconds to read and write `size` bytes of device memory."""
    return size / (gpu.memory_bandwidth * gpu.speed.memory)


def gather_seconds(gpu: Gpu, size: float, members: int, stride: int) -> float:
    """Return the seconds of an all-gather to `size` bytes, or of a reduce-scatter of `size` bytes; an all-reduce is
    both.

    Data goes round rings, over NVLink inside a node and at the same time between nodes, over the network cards of all
    members that share a node.

    Args:
        gpu: type of GPU, of which `link_domain` make a node.
        size: bytes of the whole array.
        members: number of devices in a group.
        stride: distance from one member to the next, in devices.
    """
    if members == 1:
        return 0.0
    inside = _in_a_node(gpu, members, stride)
    nodes = members / inside
    link = size * (members - 1) / members / (gpu.link_bandwidth * gpu.speed.link)
    network = size * (nodes - 1) / nodes / (inside * gpu.network_bandwidth * gpu.speed.network)
    return HANDSHAKE * (1 + math.log2(nodes)) + max(link if inside > 1 else 0, network)


def send_seconds(gpu: Gpu, size: float, members: int, stride: int) -> float:
    """Return the seconds until every member of a ring has sent `size` bytes to the next one.

    The arguments are those of `gather_seconds`.
    """
    if members == 1:
        return 0.0
    if _in_a_node(gpu, members, stride) == members:
        return HANDSHAKE + size / (gpu.link_bandwidth * gpu.speed.link)
    return HANDSHAKE + size / (gpu.network_bandwidth * gpu.speed.network)


def _in_a_node(gpu: Gpu, members: int, stride: int) -> int:
    return max(1, min(members, gpu.link_domain // stride))


def beside(communication: float, computation: float, exposed: float = 0.0) -> float:
    """Return the seconds that communication adds to a computation beside which it runs.

    Args:
        communication: seconds of the communication.
        computation: seconds of the computation that can hide it.
        exposed: seconds of the communication that nothing can hide.
    """
    waits = min(communication, max(exposed, communication - computation))
    return waits + DISTURBANCE * (communication - waits)


@dataclass(frozen=True)
class Work:
    """Add up the seconds of a device by their use, and FLOPs; only exposed communication counts."""

    matmul: float = 0.0
    attention: float = 0.0
    memory: float = 0.0
    tensor: float = 0.0
    context: float = 0.0
    fsdp: float = 0.0
    expert: float = 0.0
    pipe: float = 0.0
    flops: float = 0.0
    """FLOPs that run, including recomputed ones and excluding masked scores of fused attention."""

    def __add__(self, other: Work) -> Work:
        return Work(*(getattr(self, field.name) + getattr(other, field.name) for field in fields(self)))

    def __mul__(self, factor: float) -> Work:
        return Work(*(getattr(self, field.name) * factor for field in fields(self)))

    @property
    def computing(self) -> float:
        """Return the seconds without communication."""
        return self.matmul + self.attention + self.memory

    @property
    def seconds(self) -> float:
        """Return the seconds of all work."""
        return self.computing + self.tensor + self.context + self.fsdp + self.expert + self.pipe


def total(works: Iterable[Work]) -> Work:
    """Return the sum of several pieces of work."""
    return sum(works, Work())
