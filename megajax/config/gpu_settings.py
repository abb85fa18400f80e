"""Settings of XLA, JAX and NCCL by type of GPU, each with its reason, and how much memory JAX takes.

The launcher sets them (`python -m launch.env` prints them), the planner counts with that memory, and a step that is
compiled for GPUs that are not there (`megajax.planning.deviceless_step`) is compiled with them: all three agree. What
the user has set in the environment wins with all three.

XLA ends every program that names a flag it does not know, so a test starts JAX with all of them. Nothing is here
because it once helped: no entry without a reason that holds for the JAX of today.

Not here, on purpose:
- JAX_OPTIMIZATION_LEVEL=O1 and xla_gpu_enable_pipelined_all_gather, which NVIDIA recommends: they gather the weights of
  the next layer early, and keep them. Compiled for H100s, a step of LLaMA-2 7B with fsdp 8 has 32 GiB of temporary
  buffers with either, 19 without. Try them where there is room.
- thresholds for combining collectives: the matrices of one layer are larger than the default of 30 MiB;
- CUDA_DEVICE_MAX_CONNECTIONS=1: orders the kernels of Megatron-LM; XLA has a schedule, and Blackwell is slower with it;
- NCCL_NVLS_ENABLE, NCCL_PROTO and others that NCCL chooses by itself, and the names of network cards, which are the
  cluster's and belong into its own script.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping
from typing import Literal, NamedTuple

from megajax.config.base import InputError

GPUS = ("a100", "h100", "h200", "b200", "gb200", "b300")
BLACKWELL = ("b200", "gb200", "b300")
MEMORY_FRACTION = 0.92
"""Of a GPU's memory that JAX takes, and so what arrays can have, unless the user has set it (`memory_fraction`)."""
MEMORY = "XLA_PYTHON_CLIENT_MEM_FRACTION"
OTHER_NAMES = {MEMORY: "XLA_CLIENT_MEM_FRACTION"}
"""Variables that JAX takes for the same, and refuses beside each other."""


class Setting(NamedTuple):
    """One row of the table."""

    kind: Literal["xla", "env"]
    """A flag inside XLA_FLAGS, or a variable of its own."""
    name: str
    value: str
    gpus: tuple[str, ...]
    reason: str


TABLE = (
    Setting(
        "xla", "xla_gpu_enable_latency_hiding_scheduler", "true", GPUS,
        "collectives start early and are awaited late; false in XLA, the one flag that NVIDIA's JAX images set",
    ),
    Setting(
        "xla", "xla_gpu_enable_command_buffer", "FUSION,CUSTOM_CALL", BLACKWELL,
        "CUDA graphs of these only: what NVIDIA recommends for Blackwell (JAX-Toolbox, GPU performance)",
    ),
    Setting(
        "env", MEMORY, f"{MEMORY_FRACTION}", GPUS,
        "JAX takes 0.75 of the memory if not told; CUDA context and NCCL need some 3 GiB (NVIDIA: 0.8 to 0.9)",
    ),
    Setting(
        "env", "NCCL_DEBUG", "WARN", GPUS,
        "NCCL says why a network failed; by default it says nothing",
    ),
)  # fmt: skip


def gpu_type(description: str) -> str | None:
    """Which GPU of the table a name is of: "NVIDIA H100 80GB HBM3", "A100-80GB"; None = none."""
    return next((gpu for gpu in GPUS if re.search(rf"\b{gpu}\b", description.lower())), None)


def changes(gpu: str | None, environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Variables to set for a GPU: the table's, less what the user has set.

    Raises:
        InputError: the table has no such GPU.
    """
    if gpu is not None and gpu not in GPUS:
        raise InputError(f"no settings for GPU {gpu}: use one of {', '.join(GPUS)}")
    rows = _missing(gpu, environment)
    new = {row.name: row.value for row in rows if row.kind == "env"}
    if flags := [f"--{row.name}={row.value}" for row in rows if row.kind == "xla"]:
        new["XLA_FLAGS"] = " ".join([*environment.get("XLA_FLAGS", "").split(), *flags])
    return new


def compiler_options(gpu: str | None, environment: Mapping[str, str] = os.environ) -> dict[str, str | bool]:
    """The table's flags of XLA, less what the user has set, as options of a single compilation for a GPU."""
    flags = {row.name: row.value for row in _missing(gpu, environment) if row.kind == "xla"}
    return {name: value == "true" if value in ("true", "false") else value for name, value in flags.items()}


def memory_fraction(environment: Mapping[str, str] = os.environ) -> float:
    """How much of a GPU's memory JAX takes: what the user has set, or else the table's.

    Raises:
        InputError: what is set is no number above 0.
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
    """The variable with which the user has set `memory_fraction`; None = none."""
    return next((name for name in (MEMORY, OTHER_NAMES[MEMORY]) if environment.get(name)), None)


def settings_warning(gpu: str, environment: Mapping[str, str] = os.environ) -> str | None:
    """Which settings a program that runs on such a GPU was started without, in words; None = none.

    Args:
        gpu: name of the device, as JAX has it.
        environment: of the program.
    """
    names = [row.name for row in _missing(gpu_type(gpu), environment)]
    if not names:
        return None
    return (
        f"{', '.join(names)}: not set, so memory and speed are not those that plans count with; start with "
        'python -m launch.run, or after eval "$(python -m launch.env --export)"'
    )


def _missing(gpu: str | None, environment: Mapping[str, str]) -> list[Setting]:
    """Rows for a GPU that the user has not set."""
    given = {flag.lstrip("-").partition("=")[0] for flag in environment.get("XLA_FLAGS", "").split()}
    given |= {name for name in environment if environment[name]}
    return [
        row
        for row in TABLE
        if gpu in row.gpus and row.name not in given and OTHER_NAMES.get(row.name, row.name) not in given
    ]
