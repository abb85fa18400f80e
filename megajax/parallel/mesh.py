"""Device mesh of six named axes; `tensor` varies fastest, so that it stays inside a node's NVLink."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

import jax
from jax.sharding import AxisType, Mesh

from megajax.config.base import InputError
from megajax.config.parallel import AXES

MANUAL_AXES = ("pipe", "data")
"""Axes over which the training step communicates itself (see `parallel.run`)."""
AUTO_AXES = ("fsdp", "expert", "context", "tensor")
"""Axes over which the compiler partitions."""


def simulate_devices(count: int) -> None:
    """Make this process see `count` CPU devices.

    This has to be called before anything asks JAX for a device.

    Raises:
        InputError: another number of devices is already in use.
    """
    try:
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", count)
    except RuntimeError as error:
        if jax.default_backend() == "cpu" and jax.device_count() == count:
            return
        raise InputError(
            f"parallel.simulate_devices={count}: JAX already runs on {jax.device_count()} {jax.default_backend()} "
            "device(s) in this process: set it before the first JAX computation (restart the notebook kernel)"
        ) from error


def deterministic_kernels() -> None:
    """Let XLA use only GPU kernels that give the same bits every time.

    This has to be called before anything asks JAX for a device.
    """
    _add_flags("--xla_gpu_deterministic_ops=true")
    os.environ.setdefault("NCCL_ALGO", "Ring")  # NCCL would otherwise choose an algorithm by its own timing


def compile_fast() -> None:
    """Compile in a fifth of the time, to slower code of the same maths, for tests of many layouts of a small model.

    This has to be called before anything asks JAX for a device. Processes that this one starts inherit the setting.
    """
    flags = ["--xla_backend_optimization_level=0"]
    if jax.__version_info__ < (0, 12):  # later versions refuse the flag
        flags.append("--xla_cpu_use_fusion_emitters=false")
    _add_flags(*flags)


def _add_flags(*flags: str) -> None:
    os.environ["XLA_FLAGS"] = " ".join(dict.fromkeys([*os.environ.get("XLA_FLAGS", "").split(), *flags]))


def build_mesh(sizes: Mapping[str, int], devices: Sequence[jax.Device] | None = None) -> Mesh:
    """Build a mesh with the sizes of all AXES, whose product is the number of `devices` (default: all)."""
    shape = tuple(sizes[axis] for axis in AXES)
    return jax.make_mesh(shape, AXES, axis_types=(AxisType.Auto,) * len(AXES), devices=devices)
