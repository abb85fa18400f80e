"""`python -m launch.env [--gpu h100] [--export]`: settings of XLA, JAX and NCCL by type of GPU, each with its reason.

    eval "$(python -m launch.env --export)"

`launch.local`, `launch.run` and the SLURM script apply the table where there are GPUs, and print what they set. What
the user has set already, stays. XLA ends every program that names a flag it does not know, so a test starts JAX with
all of them. Nothing is here because it once helped: no entry without a reason that holds for the JAX of today.

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

import os
import re
import shlex
import sys
from collections.abc import Mapping
from typing import Literal, NamedTuple

from launch.gpus import query
from megajax.config.base import ConfigError
from megajax.config.cli import OneLineParser, entry_point

GPUS = ("a100", "h100", "h200", "b200", "gb200")
BLACKWELL = ("b200", "gb200")


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
        "env", "XLA_PYTHON_CLIENT_MEM_FRACTION", "0.92", GPUS,
        "JAX takes 0.75 of the memory if not told; CUDA context and NCCL need some 3 GiB (NVIDIA: 0.8 to 0.9)",
    ),
    Setting(
        "env", "NCCL_DEBUG", "WARN", GPUS,
        "NCCL says why a network failed; by default it says nothing",
    ),
)  # fmt: skip


@entry_point
def main(argv: list[str]) -> None:
    """The command line."""
    parser = OneLineParser(prog="python -m launch.env", description="Settings of XLA and NCCL.", allow_abbrev=False)
    parser.add_argument("--gpu", choices=GPUS, default=find_gpu_type(), help="default: the one that is here")
    parser.add_argument("--export", action="store_true", help="lines for a shell to evaluate")
    options = parser.parse_args(argv)
    if options.export:
        for name, value in changes(options.gpu).items():
            print(f"export {name}={shlex.quote(value)}")
        return
    print(f"{options.gpu or 'no GPU of the table here: every row'}")
    for row in TABLE:
        if options.gpu is None or options.gpu in row.gpus:
            where = "" if row.gpus == GPUS else f" [{' '.join(row.gpus)}]"
            print(f"  {row.kind}  {row.name}={row.value}{where}\n       {row.reason}")


def find_gpu_type() -> str | None:
    """Which GPU of the table this machine has."""
    names = " ".join(query("name")).lower()
    return next((gpu for gpu in reversed(GPUS) if re.search(rf"\b{gpu}\b", names)), None)


def changes(gpu: str | None, environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Variables to set for a GPU: the table's, less what the user has set.

    Raises:
        ConfigError: the table has no such GPU.
    """
    if gpu is not None and gpu not in GPUS:
        raise ConfigError(f"no settings for GPU {gpu}: use one of {', '.join(GPUS)}")
    new: dict[str, str] = {}
    flags = environment.get("XLA_FLAGS", "").split()
    given = {flag.lstrip("-").partition("=")[0] for flag in flags}
    for row in TABLE:
        if gpu not in row.gpus or row.name in given or row.name in environment:
            continue
        if row.kind == "xla":
            flags.append(f"--{row.name}={row.value}")
            new["XLA_FLAGS"] = " ".join(flags)
        else:
            new[row.name] = row.value
    return new


def announce_changes(environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """The variables to set for the GPU of this machine, printed; none on a machine without."""
    new = changes(find_gpu_type(), environment)
    for name, value in new.items():
        print(f"launch: {name}={value}", file=sys.stderr)
    return new


if __name__ == "__main__":
    sys.exit(main())
