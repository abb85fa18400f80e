"""Settings of XLA, JAX and NCCL by type of GPU, each with its reason.

The launcher sets them (`python -m launch.env` prints them), the planner assumes the memory that they give to JAX, and a
step for absent GPUs (`megajax.planning.deviceless`) is compiled with them. For all three, settings in the user's
environment take precedence.

XLA ends every program that names an unknown flag, so a test starts JAX with all of them. Every entry has a reason that
holds for the JAX of today; a setting that only once helped is left out.

Left out on purpose:
- JAX_OPTIMIZATION_LEVEL=O1 and xla_gpu_enable_pipelined_all_gather, which NVIDIA recommends: they gather the weights of
  the next layer early, and keep them. Compiled for H100s, a step of LLaMA-2 7B with fsdp 8 has 32 GiB of temporary
  buffers with either, 19 without. Try them where there is room.
- thresholds for combining collectives: the matrices of one layer are larger than the default of 30 MiB;
- CUDA_DEVICE_MAX_CONNECTIONS=1: orders the kernels of Megatron-LM; XLA has a schedule, and Blackwell is slower with it;
- NCCL_NVLS_ENABLE, NCCL_PROTO and others that NCCL chooses by itself, and the names of network cards, which are the
  cluster's and belong into its own script.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import Literal, NamedTuple

from megajax.config.base import InputError
from megajax.costs.hardware import GPUS, MEMORY, MEMORY_FRACTION, OTHER_NAMES

TYPES = tuple(dict.fromkeys(gpu.type for gpu in GPUS))
"""Types of GPUs, whose members share their settings: "h100" is every H100."""
BLACKWELL = tuple(dict.fromkeys(gpu.type for gpu in GPUS if gpu.capability == 10))


class Setting(NamedTuple):
    """A setting of XLA, JAX or NCCL, its GPUs and its reason, as one row of the table."""

    kind: Literal["xla", "env"]
    """Place of the setting: a flag inside XLA_FLAGS, or a variable of its own."""
    name: str
    value: str
    gpus: tuple[str, ...]
    reason: str


TABLE = (
    Setting(
        "xla", "xla_gpu_enable_latency_hiding_scheduler", "true", TYPES,
        "collectives start early and are awaited late; false in XLA, the one flag that NVIDIA's JAX images set",
    ),
    Setting(
        "xla", "xla_gpu_enable_command_buffer", "FUSION,CUSTOM_CALL", BLACKWELL,
        "CUDA graphs of these only: what NVIDIA recommends for Blackwell (JAX-Toolbox, GPU performance)",
    ),
    Setting(
        "env", MEMORY, f"{MEMORY_FRACTION}", TYPES,
        "JAX takes 0.75 of the memory if not told; CUDA context and NCCL need some 3 GiB (NVIDIA: 0.8 to 0.9)",
    ),
    Setting(
        "env", "NCCL_DEBUG", "WARN", TYPES,
        "NCCL says why a network failed; by default it says nothing",
    ),
)  # fmt: skip


def gpu_type(description: str) -> str | None:
    """Return the type of a GPU from a name such as "NVIDIA H100 80GB HBM3" or "A100-80GB", or None if it is not in the
    table.
    """
    return next((gpu for gpu in TYPES if re.search(rf"\b{gpu}\b", description.lower())), None)


def changes(gpu: str | None, environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return the variables to set for a GPU: those of the table that the user has not set.

    Raises:
        InputError: the GPU is not in the table.
    """
    if gpu is not None and gpu not in TYPES:
        raise InputError(f"no settings for GPU {gpu}: use one of {', '.join(TYPES)}")
    rows = _missing(gpu, environment)
    new = {row.name: row.value for row in rows if row.kind == "env"}
    if flags := [f"--{row.name}={row.value}" for row in rows if row.kind == "xla"]:
        new["XLA_FLAGS"] = " ".join([*environment.get("XLA_FLAGS", "").split(), *flags])
    return new


def compiler_options(gpu: str | None, environment: Mapping[str, str] = os.environ) -> dict[str, str | bool]:
    """Return the flags of XLA that the user has not set, as options of a single compilation for a GPU."""
    flags = {row.name: row.value for row in _missing(gpu, environment) if row.kind == "xla"}
    return {name: value == "true" if value in ("true", "false") else value for name, value in flags.items()}


def settings_warning(gpu: str, environment: Mapping[str, str] = os.environ) -> str | None:
    """Return a warning that names the settings that a program on such a GPU lacks, or None if it has all of them.

    Args:
        gpu: name of the device, as JAX has it.
        environment: environment variables of the program.
    """
    names = [row.name for row in _missing(gpu_type(gpu), environment)]
    if not names:
        return None
    return (
        f"{', '.join(names)}: not set, so memory and speed are not those that plans count with; start with "
        'python -m launch.run, or after eval "$(python -m launch.env --export)"'
    )


def _missing(gpu: str | None, environment: Mapping[str, str]) -> list[Setting]:
    """Return the rows of the table for a GPU that the user has not set."""
    given = {flag.lstrip("-").partition("=")[0] for flag in environment.get("XLA_FLAGS", "").split()}
    given |= {name for name in environment if environment[name]}
    return [
        row
        for row in TABLE
        if gpu in row.gpus and row.name not in given and OTHER_NAMES.get(row.name, row.name) not in given
    ]
