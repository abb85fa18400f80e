"""Peaks of the devices a run may meet: the denominator of MFU and the slopes of the roofline.

Peaks are *dense*: data sheets print twice as much, for 2:4 sparse matrices that nobody trains with. Sources: NVIDIA
data sheets; memory sizes are about what the driver reports. A device that is not in the table has no peak ("n/a"): a
wrong MFU is worse than none.
"""

from __future__ import annotations

import re
import time
from dataclasses import dataclass

import jax
import jax.numpy as jnp


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
    memory_bytes: float
    memory_bandwidth: float
    """Bytes/s of device memory."""
    link_bandwidth: float
    """NVLink bytes/s."""
    network_bandwidth: float
    """Bytes/s of the network card that serves one GPU."""


# Specific names first: the first expression found in the device kind wins.
GPUS = (
    Gpu("A100-40GB", r"A100.*40GB", 312, 156, 42.4e9, 1.555e12, 300e9, 25e9),
    Gpu("A100-80GB", r"A100.*80GB", 312, 156, 85.1e9, 2.039e12, 300e9, 25e9),
    Gpu("H100-PCIe", r"H100 PCIe", 756.5, 378, 84.9e9, 2.0e12, 300e9, 50e9),
    Gpu("H100-NVL", r"H100 NVL", 835.5, 417.5, 99.9e9, 3.9e12, 300e9, 50e9),
    Gpu("H100", r"\bH100\b", 989.5, 494.5, 84.9e9, 3.35e12, 450e9, 50e9),
    Gpu("H200-NVL", r"H200 NVL", 835.5, 417.5, 151.4e9, 4.8e12, 450e9, 50e9),
    Gpu("H200", r"\bH200\b", 989.5, 494.5, 151.4e9, 4.8e12, 450e9, 50e9),
    Gpu("GB200", r"\bGB200\b", 2500, 1250, 197.9e9, 7.93e12, 900e9, 50e9),
    Gpu("B200", r"\bB200\b", 2250, 1125, 191.5e9, 7.67e12, 900e9, 50e9),
    Gpu("B300", r"\bB300\b", 2250, 1125, 288e9, 8.0e12, 900e9, 100e9),
)


def find_gpu(device_kind: str) -> Gpu | None:
    """The table's entry for `jax.Device.device_kind` ("NVIDIA H100 80GB HBM3"), or None."""
    return next((gpu for gpu in GPUS if re.search(gpu.kind, device_kind)), None)


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
