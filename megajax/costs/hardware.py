"""The table of GPUs: peaks, the shares of them that training reaches, memory, network, and facts for XLA.

A new GPU is a new row of `GPUS`: MFU, planner, settings of XLA (`costs.gpu_settings`) and compilation for absent GPUs
(`planning.deviceless`) all read this table. The launcher reads it too, so this module does not import JAX.

Peaks are *dense*: data sheets print twice as much, for 2:4 sparse matrices, which are not used in training. The sources
are NVIDIA's data sheets; memory sizes are roughly those that the driver reports. A device that is not in the table has
no peak ("n/a"), because a wrong MFU is worse than none.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace

from megajax.config.base import InputError

MEMORY_FRACTION = 0.92
"""Share of a GPU's memory that JAX takes for arrays, unless the user has set another (`memory_fraction`)."""
MEMORY = "XLA_PYTHON_CLIENT_MEM_FRACTION"
"""Name of the environment variable that sets the share of a GPU's memory that JAX takes."""
OTHER_NAMES = {MEMORY: "XLA_CLIENT_MEM_FRACTION"}
"""Environment variables -> another name that JAX reads for the same value, and refuses beside the first."""


@dataclass(frozen=True)
class Speed:
    """The shares of a GPU's peaks that large operations reach in training, one constant per class of operations.

    The share of matrix products is the rate of the best tuned product (A100 271, H100 795, B200 1,745, GB200 1,822
    TFLOP/s in 16 bits; H100 1,403 and B200 3,433 in fp8; Bekman, ML Engineering), times the part of it that remains
    when the GPU is hot, at its power limit, and multiplies real numbers: 0.94 on A100, 0.82 since. That part, attention
    and network are set once, for all published step times of the A100 and the H100 together
    (tests/planning/test_step_time.py); Blackwell has Hopper's values until it is measured. NVLink reaches 370 of 450
    GB/s (same source).
    """

    matmul: float
    """Share of the dense 16-bit (or TF32) peak that large matrix products reach."""
    matmul_fp8: float
    """Share of the dense fp8 peak that large matrix products in fp8 reach."""
    attention: float
    """Share of the dense 16-bit peak that fused attention reaches, counting only scores that a causal mask keeps."""
    memory: float
    """Share of the memory bandwidth that elementwise operations, norms and optimizer reach."""
    link: float
    """Share of the NVLink bandwidth that large collectives inside a node reach."""
    network: float
    """Share of the network bandwidth that large collectives between nodes reach."""


AMPERE = Speed(matmul=0.82, matmul_fp8=0.0, attention=0.50, memory=0.85, link=0.82, network=0.85)
HOPPER = Speed(matmul=0.66, matmul_fp8=0.58, attention=0.55, memory=0.85, link=0.82, network=0.85)
BLACKWELL = Speed(matmul=0.64, matmul_fp8=0.63, attention=0.55, memory=0.85, link=0.82, network=0.85)
GRACE_BLACKWELL = replace(BLACKWELL, matmul=0.60, matmul_fp8=0.60)


@dataclass(frozen=True)
class Chip:
    """The facts about a GPU that only XLA's compiler needs, as the CUDA driver reports them; sizes in bytes."""

    device_kind: str
    """Value of `jax.Device.device_kind` on this GPU."""
    lanes: int
    """Number of fp32 units per multiprocessor."""
    clock_ghz: float
    l2_cache: int
    shared_memory: int
    """Bytes of shared memory per multiprocessor; a block may have 1 KiB less."""


@dataclass(frozen=True)
class Gpu:
    """GPU with its peaks, memory and network; rates are per second and device, in one direction."""

    name: str
    kind: str
    """Regular expression that is searched for in `jax.Device.device_kind`."""
    capability: int
    """CUDA compute capability, major version: 8 is Ampere, 9 Hopper, 10 Blackwell."""
    half_tflops: float
    """Dense bf16 and fp16 tensor-core peak, 1e12 FLOP/s."""
    tf32_tflops: float
    """Dense TF32 peak, 1e12 FLOP/s; XLA uses TF32 for fp32 matrix products by default."""
    fp8_tflops: float | None
    """Dense fp8 peak, 1e12 FLOP/s; None = the tensor cores have no fp8."""
    multiprocessors: int
    memory_bytes: float
    memory_bandwidth: float
    """Bandwidth of device memory, bytes/s."""
    link_bandwidth: float
    """Bandwidth of NVLink, bytes/s."""
    network_bandwidth: float
    """Bandwidth of the network card that serves one GPU, bytes/s."""
    speed: Speed
    link_domain: int = 8
    """Number of GPUs that NVLink connects."""
    chip: Chip | None = None
    """Facts for the compiler; None = the compiler needs the GPU itself."""

    @property
    def type(self) -> str:
        """Return the key of the GPU's settings, such as "h100" for every H100."""
        return self.name.partition("-")[0].lower()

    @property
    def array_bytes(self) -> float:
        """Return the bytes of memory for arrays.

        The launcher gives JAX this much; the rest is for CUDA, NCCL and fragments.

        Raises:
            InputError: the user's share of the memory is not a number above 0.
        """
        return memory_fraction() * self.memory_bytes


# Specific names first: the first expression found in the device kind wins.
GPUS = (
    Gpu("A100-40GB", r"A100.*40GB", 8, 312, 156, None, 108, 42.4e9, 1.555e12, 300e9, 25e9, AMPERE),
    Gpu(
        "A100-80GB", r"A100.*80GB", 8, 312, 156, None, 108, 85.1e9, 2.039e12, 300e9, 25e9, AMPERE,
        chip=Chip("NVIDIA A100-SXM4-80GB", 64, 1.41, 41_943_040, 167_936),
    ),
    Gpu("H100-PCIe", r"H100 PCIe", 9, 756.5, 378, 1513, 114, 84.9e9, 2.0e12, 300e9, 50e9, HOPPER, link_domain=2),
    Gpu("H100-NVL", r"H100 NVL", 9, 835.5, 417.5, 1671, 132, 99.9e9, 3.9e12, 300e9, 50e9, HOPPER, link_domain=2),
    Gpu(
        "H100", r"\bH100\b", 9, 989.5, 494.5, 1979, 132, 84.9e9, 3.35e12, 450e9, 50e9, HOPPER,
        chip=Chip("NVIDIA H100 80GB HBM3", 128, 1.98, 52_428_800, 233_472),
    ),
    Gpu("H200-NVL", r"H200 NVL", 9, 835.5, 417.5, 1671, 132, 151.4e9, 4.8e12, 450e9, 50e9, HOPPER, link_domain=4),
    Gpu(
        "H200", r"\bH200\b", 9, 989.5, 494.5, 1979, 132, 151.4e9, 4.8e12, 450e9, 50e9, HOPPER,
        chip=Chip("NVIDIA H200", 128, 1.98, 52_428_800, 233_472),
    ),
    Gpu(
        "B200", r"\bB200\b", 10, 2250, 1125, 4500, 148, 191.5e9, 7.67e12, 900e9, 50e9, BLACKWELL,
        chip=Chip("NVIDIA B200", 128, 1.965, 132_644_864, 233_472),
    ),
    Gpu(
        "GB200", r"\bGB200\b", 10, 2500, 1250, 5000, 152, 197.9e9, 7.93e12, 900e9, 50e9, GRACE_BLACKWELL,
        link_domain=72, chip=Chip("NVIDIA GB200", 128, 2.062, 135_528_448, 233_472),
    ),
    Gpu("B300", r"\bB300\b", 10, 2250, 1125, 4500, 148, 288e9, 8.0e12, 900e9, 100e9, BLACKWELL),
)  # fmt: skip


def find_gpu(device_kind: str) -> Gpu | None:
    """Return the row for a `jax.Device.device_kind` such as "NVIDIA H100 80GB HBM3", or None if there is none."""
    return next((gpu for gpu in GPUS if re.search(gpu.kind, device_kind)), None)


def gpu_named(name: str) -> Gpu:
    """Return the row with this name, in upper or lower case.

    Raises:
        InputError: there is none; the message lists the names and tells how to add a row.
    """
    for gpu in GPUS:
        if gpu.name.lower() == name.lower():
            return gpu
    known = ", ".join(sorted(gpu.name for gpu in GPUS))
    raise InputError(
        f"unknown GPU {name!r}: known are {known}; to add it, write a line into GPUS of {__name__}, with the dense "
        "peaks of its data sheet, and as kind what jax.devices()[0].device_kind says on it"
    )


@dataclass(frozen=True)
class Peak:
    """The peak of one device and the source of the number."""

    flops: float | None
    """Peak in FLOP/s, or None if unknown."""
    label: str
    """Source of the number for the log, where MFU is explained."""


def table_peak(device_kind: str, precision: str) -> Peak:
    """Return the dense peak of a GPU, found by its `device_kind`."""
    gpu = find_gpu(device_kind)
    if gpu is None:
        return Peak(None, f"n/a, unknown device {device_kind!r} (set log.peak_tflops)")
    tflops, numbers = (gpu.tf32_tflops, "TF32") if precision == "fp32" else (gpu.half_tflops, precision)
    return Peak(tflops * 1e12, f"{tflops:g} TFLOP/s, dense {numbers} of {gpu.name}")


def memory_fraction(environment: Mapping[str, str] = os.environ) -> float:
    """Return the share of a GPU's memory that JAX takes: the user's, or else MEMORY_FRACTION.

    Raises:
        InputError: the user's share is not a number above 0.
    """
    name = memory_variable(environment)
    if name is None:
        return MEMORY_FRACTION
    try:
        fraction = float(environment[name])
    except ValueError:
        fraction = 0.0
    if not 0 < fraction < math.inf:
        raise InputError(
            f"{name}={environment[name]} in the environment is no part of a GPU's memory: give a number such as "
            f"{MEMORY_FRACTION}, or unset it"
        )
    return fraction


def memory_variable(environment: Mapping[str, str] = os.environ) -> str | None:
    """Return the name of the variable with which the user has set `memory_fraction`, or None if no variable is set."""
    return next((name for name in (MEMORY, OTHER_NAMES[MEMORY]) if environment.get(name)), None)
