"""Peaks of the devices a run may meet, and how much of them is reached: the denominator of MFU, the roofline.

Peaks are *dense*: data sheets print twice as much, for 2:4 sparse matrices that nobody trains with. Sources: NVIDIA
data sheets; memory sizes are about what the driver reports. A device that is not in the table has no peak ("n/a"): a
wrong MFU is worse than none.
"""

from __future__ import annotations

import re
import time
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp

from megajax.config.base import InputError
from megajax.config.gpu_settings import memory_fraction


@dataclass(frozen=True)
class Speed:
    """Shares of a GPU's peaks that large operations reach in training, one constant per class of operations.

    Matrix products: what the best tuned one reaches (A100 271, H100 795, B200 1,745, GB200 1,822 TFLOP/s in 16 bits;
    H100 1,403 and B200 3,433 in fp8; Bekman, ML Engineering) times what is left of it when the GPU is hot, at its power
    limit, and multiplies real numbers: 0.94 on A100, 0.82 since. That, attention and network are set once, for all
    published step times of the A100 and the H100 together (tests/planning/test_step_time.py); Blackwell has Hopper's
    until somebody measures. NVLink: 370 of 450 GB/s, same source.
    """

    matmul: float
    """Of the dense 16-bit (or TF32) peak: large matrix products."""
    matmul_fp8: float
    """Of the dense fp8 peak: the same in fp8."""
    attention: float
    """Of the dense 16-bit peak: fused attention, counting the scores that a causal mask leaves."""
    memory: float
    """Of the memory bandwidth: elementwise operations, norms, optimizer."""
    link: float
    """Of the NVLink bandwidth: large collectives inside a node."""
    network: float
    """Of the network bandwidth: large collectives between nodes."""


AMPERE = Speed(matmul=0.82, matmul_fp8=0.0, attention=0.50, memory=0.85, link=0.82, network=0.85)
HOPPER = Speed(matmul=0.66, matmul_fp8=0.58, attention=0.55, memory=0.85, link=0.82, network=0.85)
BLACKWELL = Speed(matmul=0.64, matmul_fp8=0.63, attention=0.55, memory=0.85, link=0.82, network=0.85)
GRACE_BLACKWELL = replace(BLACKWELL, matmul=0.60, matmul_fp8=0.60)


@dataclass(frozen=True)
class Gpu:
    """One GPU; rates per second and device, one direction."""

    name: str
    kind: str
    """Regular expression on `jax.Device.device_kind`."""
    half_tflops: float
    """Dense bf16 and fp16 tensor-core peak, 1e12 FLOP/s."""
    tf32_tflops: float
    """Dense TF32 peak, 1e12 FLOP/s: what XLA uses for fp32 matrix products by default."""
    fp8_tflops: float | None
    """Dense fp8 peak, 1e12 FLOP/s; None = the tensor cores have no fp8."""
    multiprocessors: int
    memory_bytes: float
    memory_bandwidth: float
    """Bytes/s of device memory."""
    link_bandwidth: float
    """NVLink bytes/s."""
    network_bandwidth: float
    """Bytes/s of the network card that serves one GPU."""
    speed: Speed
    link_domain: int = 8
    """GPUs that NVLink connects."""

    @property
    def array_bytes(self) -> float:
        """Bytes that arrays can have: what the launcher gives JAX. The rest is for CUDA, NCCL and fragments.

        Raises:
            InputError: the user has set it to what is no number above 0.
        """
        return memory_fraction() * self.memory_bytes


# Specific names first: the first expression found in the device kind wins.
GPUS = (
    Gpu("A100-40GB", r"A100.*40GB", 312, 156, None, 108, 42.4e9, 1.555e12, 300e9, 25e9, AMPERE),
    Gpu("A100-80GB", r"A100.*80GB", 312, 156, None, 108, 85.1e9, 2.039e12, 300e9, 25e9, AMPERE),
    Gpu("H100-PCIe", r"H100 PCIe", 756.5, 378, 1513, 114, 84.9e9, 2.0e12, 300e9, 50e9, HOPPER, link_domain=2),
    Gpu("H100-NVL", r"H100 NVL", 835.5, 417.5, 1671, 132, 99.9e9, 3.9e12, 300e9, 50e9, HOPPER, link_domain=2),
    Gpu("H100", r"\bH100\b", 989.5, 494.5, 1979, 132, 84.9e9, 3.35e12, 450e9, 50e9, HOPPER),
    Gpu("H200-NVL", r"H200 NVL", 835.5, 417.5, 1671, 132, 151.4e9, 4.8e12, 450e9, 50e9, HOPPER, link_domain=4),
    Gpu("H200", r"\bH200\b", 989.5, 494.5, 1979, 132, 151.4e9, 4.8e12, 450e9, 50e9, HOPPER),
    Gpu("GB200", r"\bGB200\b", 2500, 1250, 5000, 152, 197.9e9, 7.93e12, 900e9, 50e9, GRACE_BLACKWELL, link_domain=72),
    Gpu("B200", r"\bB200\b", 2250, 1125, 4500, 148, 191.5e9, 7.67e12, 900e9, 50e9, BLACKWELL),
    Gpu("B300", r"\bB300\b", 2250, 1125, 4500, 148, 288e9, 8.0e12, 900e9, 100e9, BLACKWELL),
)


def find_gpu(device_kind: str) -> Gpu | None:
    """The table's entry for `jax.Device.device_kind` ("NVIDIA H100 80GB HBM3"), or None."""
    return next((gpu for gpu in GPUS if re.search(gpu.kind, device_kind)), None)


def gpu_named(name: str) -> Gpu:
    """The table's entry of that name, in any case.

    Raises:
        InputError: there is none; lists those there are and says how to add one.
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
    """Peak of one device and where it comes from."""

    flops: float | None
    """FLOP/s, or None if unknown."""
    label: str
    """For the log, where MFU is explained."""


def device_peak(device: jax.Device, precision: str, override_tflops: float | None = None) -> Peak:
    """Dense peak of `device` for matrix products in `precision` ("bf16", "fp16" or "fp32").

    A CPU is measured; simulated devices share its cores and so its peak.

    Args:
        device: Any device of the mesh.
        precision: `train.precision`.
        override_tflops: `log.peak_tflops`; 0 = no MFU.
    """
    if override_tflops is not None:
        return Peak(override_tflops * 1e12 or None, f"{override_tflops:g} TFLOP/s from log.peak_tflops")
    if device.platform == "cpu":
        flops = measured_matmul_peak(precision) / device.client.local_device_count()
        return Peak(flops, f"{flops / 1e12:.3f} TFLOP/s, measured {precision} matrix product on this CPU")
    return table_peak(device.device_kind, precision)


def table_peak(device_kind: str, precision: str) -> Peak:
    """Dense peak of a GPU from its name alone."""
    gpu = find_gpu(device_kind)
    if gpu is None:
        return Peak(None, f"n/a, unknown device {device_kind!r} (set log.peak_tflops)")
    tflops, numbers = (gpu.tf32_tflops, "TF32") if precision == "fp32" else (gpu.half_tflops, precision)
    return Peak(tflops * 1e12, f"{tflops:g} TFLOP/s, dense {numbers} of {gpu.name}")


def measured_matmul_peak(precision: str, size: int = 512, seconds: float = 0.2) -> float:
    """Best FLOP/s of a jitted `size` x `size` matrix product on the default device, tried for about `seconds`."""
    dtype = {"fp32": jnp.float32, "bf16": jnp.bfloat16, "fp16": jnp.float16}[precision]
    x = jnp.ones((size, size), dtype)
    product = jax.jit(jnp.matmul).lower(x, x).compile()
    best, deadline = float("inf"), time.perf_counter() + seconds
    while best == float("inf") or time.perf_counter() < deadline:
        start = time.perf_counter()
        product(x, x).block_until_ready()
        best = min(best, time.perf_counter() - start)
    return 2 * size**3 / best
