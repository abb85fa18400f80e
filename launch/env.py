"""`python -m launch.env [--gpu h100] [--export]`: settings of XLA, JAX and NCCL by type of GPU, each with its reason.

    eval "$(python -m launch.env --export)"

`launch.local`, `launch.run` and the SLURM script apply the table where there are GPUs, and print what they set. What
the user has set already, stays. XLA ends every program that names a flag it does not know, so a test starts JAX with
all of them. Nothing is here because it once helped: no entry without a reason that holds for the JAX of today.

Not here, on purpose: CUDA_DEVICE_MAX_CONNECTIONS (Blackwell is slower with 1, and Megatron-LM wants it for an order
that XLA's schedule fixes itself), NCCL_NVLS_ENABLE and other choices that NCCL makes by itself, asynchronous and
pipelined collectives (on by default), thresholds for combining collectives (XLA fits them to the device's memory), and
network settings, which are the cluster's and belong into its own script.
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
        "starts collectives early and waits for them late; off by default, on in NVIDIA's JAX images",
    ),
    Setting(
        "xla", "xla_gpu_enable_command_buffer", "FUSION,CUSTOM_CALL", BLACKWELL,
        "CUDA graphs of these kinds only: NVIDIA's advice for Blackwell, where launches cost more than kernels",
    ),
    Setting(
        "env", "XLA_PYTHON_CLIENT_MEM_FRACTION", "0.92", GPUS,
        "JAX takes 75 % of the memory by default; the CUDA context and NCCL need some 3 GiB, not 20",
    ),
    Setting(
        "env", "NCCL_DEBUG", "WARN", GPUS,
        "a failing network is explained in NCCL's words; by default it says nothing",
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
        print("\n".join(f"export {name}={shlex.quote(value)}" for name, value in changes(options.gpu).items()))
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
