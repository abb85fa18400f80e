"""The speed of a run: seconds per step, tokens/s, TFLOP/s per device, MFU.

MFU (model FLOPs utilisation, PaLM, 2204.02311, appendix B) = model FLOPs / (seconds x devices x peak FLOP/s). Model
FLOPs exclude recomputation, so that more of it cannot raise MFU.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import jax
import jax.numpy as jnp


@dataclass(frozen=True)
class Speed:
    """The mean speed of some steps."""

    seconds: float
    """Seconds per step."""
    tokens_per_second: float
    """Tokens per second over all devices."""
    tflops_per_device: float
    """Model FLOPs per second and device, in units of 1e12."""
    mfu: float | None
    """Fraction of the peak that model FLOPs reach; None if the peak is unknown."""

    def scalars(self) -> dict[str, float]:
        """Return the speed as scalars for the metrics files."""
        scalars = {
            "iteration-time": self.seconds,
            "throughput": self.tflops_per_device,
            "tokens-per-second": self.tokens_per_second,
        }
        return scalars if self.mfu is None else scalars | {"mfu": self.mfu}


@dataclass(frozen=True, kw_only=True)
class Throughput:
    """The cost of a sample and the peak of the devices."""

    flops_per_sample: float
    """Model FLOPs of a sample, forward and backward."""
    tokens_per_sample: int
    """Tokens of a sample."""
    devices: int
    attention: str
    """Attention scores that `flops_per_sample` counts, in words: "full" or "causal"."""
    peak_flops: float | None
    """Dense peak FLOP/s of one device; None = unknown."""
    peak_label: str
    """Origin of the peak, in words."""

    def speed(self, samples: int, seconds: float, steps: int = 1) -> Speed:
        """Return the speed of `steps` steps that took `seconds` in all for `samples` samples."""
        flops_per_second = self.flops_per_sample * samples / seconds / self.devices
        return Speed(
            seconds=seconds / steps,
            tokens_per_second=self.tokens_per_sample * samples / seconds,
            tflops_per_device=flops_per_second / 1e12,
            mfu=flops_per_second / self.peak_flops if self.peak_flops else None,
        )

    def describe(self) -> str:
        """Return the formula behind the numbers, to be printed once per run."""
        return (
            f"MFU = model FLOPs / (seconds x {self.devices} devices x peak); model FLOPs per sample "
            f"{self.flops_per_sample:.4g} ({self.attention} attention, no recomputation); peak {self.peak_label}"
        )


def measured_matmul_peak(precision: str, size: int = 512, seconds: float = 0.2) -> float:
    """Measure the best FLOP/s of a jitted `size` x `size` matrix product on the default device in about `seconds`."""
    dtype = {"fp32": jnp.float32, "bf16": jnp.bfloat16, "fp16": jnp.float16}[precision]
    x = jnp.ones((size, size), dtype)
    product = jax.jit(jnp.matmul).lower(x, x).compile()
    best, deadline = float("inf"), time.perf_counter() + seconds
    while best == float("inf") or time.perf_counter() < deadline:
        start = time.perf_counter()
        product(x, x).block_until_ready()
        best = min(best, time.perf_counter() - start)
    return 2 * size**3 / best
