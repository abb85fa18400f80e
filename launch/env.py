"""`python -m launch.env [--gpu h100] [--export]`: settings of XLA, JAX and NCCL by type of GPU, each with its reason.

    eval "$(python -m launch.env --export)"

`launch.local`, `launch.run` and the SLURM script apply the table where there are GPUs, and print what they set. What
the user has set already, stays. The table is `megajax.costs.gpu_settings`, which says what is not in it and why.
"""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Mapping

from launch.gpus import query
from megajax.config.cli import OneLineParser, entry_point
from megajax.costs.gpu_settings import TABLE, TYPES, changes, gpu_type


@entry_point
def main(argv: list[str]) -> None:
    """Run the command line."""
    parser = OneLineParser(prog="python -m launch.env", description="Settings of XLA and NCCL.", allow_abbrev=False)
    parser.add_argument("--gpu", choices=TYPES, default=find_gpu_type(), help="default: the one that is here")
    parser.add_argument("--export", action="store_true", help="lines for a shell to evaluate")
    options = parser.parse_args(argv)
    if options.export:
        for name, value in changes(options.gpu).items():
            print(f"export {name}={shlex.quote(value)}")
        return
    print(f"{options.gpu or 'no GPU of the table here: every row'}")
    for row in TABLE:
        if options.gpu is None or options.gpu in row.gpus:
            where = "" if row.gpus == TYPES else f" [{' '.join(row.gpus)}]"
            print(f"  {row.kind}  {row.name}={row.value}{where}\n       {row.reason}")


def find_gpu_type() -> str | None:
    """Return the name under which the table knows this machine's GPU, or None."""
    return gpu_type(" ".join(query("name")))


def announce_changes(environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Print and return the variables to set for this machine's GPU; without a GPU there are none."""
    new = changes(find_gpu_type(), environment)
    for name, value in new.items():
        print(f"launch: {name}={value}", file=sys.stderr)
    return new


if __name__ == "__main__":
    sys.exit(main())
