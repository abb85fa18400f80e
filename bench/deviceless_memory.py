"""`python -m bench.deviceless_memory`: memory and traffic of a step of published models, on absent H100s.

The real training step of 22B to 1T parameters (2205.05198, table 3) is compiled for 8 to 3,072 GPUs, on a CPU with
JAX's CUDA plugin, and a line for each is printed. `seconds` is the time to trace, lower and compile; `arguments` are
state and batch, `temporary` are XLA's other buffers, and `ring` is the part of these for activations that the pipeline
saves (GiB per GPU). GiB that cross each mesh axis in a step follow, counting whole tensors.
"""

from __future__ import annotations

import sys

import jax

from megajax.config import InputError
from megajax.planning.collectives import collectives
from megajax.planning.deviceless import compile_step
from megajax.planning.layouts import layout_name
from tests.planning.compiled_memory import NODES_16, published, ring_bytes

GIB = 2**30
SENT_OVER = ("tensor", "pipe", "data")
ROWS = (
    # preset, words of a command line
    ("megatron_22b", "parallel.tensor=8 train.micro_batch_size=4"),
    ("megatron_175b", NODES_16),
    ("megatron_175b", f"{NODES_16} train.remat=full"),
    ("megatron_175b", f"{NODES_16} parallel.chunks=3"),
    ("megatron_175b", f"{NODES_16} parallel.chunks=3 train.remat=full"),
    ("megatron_530b", f"{NODES_16} parallel.pipe=35 parallel.data=8 parallel.chunks=3 train.global_batch_size=2240"),
    ("megatron_1t", f"{NODES_16} parallel.pipe=64 parallel.data=6 train.global_batch_size=3072"),
)


def main() -> int:
    """Print the table; 2 if there is nothing to compile with."""
    jax.config.update("jax_platforms", "cpu")
    print(f"{'model':<14}{'GPUs':>5}{'seconds':>9}{'arguments':>11}{'temporary':>11}{'ring':>7}", end="")
    print("".join(f"{axis:>9}" for axis in SENT_OVER), " layout")
    for preset, words in ROWS:
        config = published(preset, words)
        try:
            compiled = compile_step(config, "H100")
        except InputError as error:
            print(error, file=sys.stderr)
            return 2
        memory = compiled.step.memory_analysis()
        traffic = collectives(compiled.step, compiled.rules.mesh)
        gib = [
            memory.argument_size_in_bytes / GIB,
            memory.temp_size_in_bytes / GIB,
            ring_bytes(config, compiled.step) / GIB,
            *(traffic.over(axis).total_bytes() / GIB for axis in SENT_OVER),
        ]
        print(f"{preset:<14}{compiled.rules.mesh.size:>5}{compiled.seconds:>9.1f}", end="")
        print("{:>11.2f}{:>11.2f}{:>7.2f}{:>9.1f}{:>9.1f}{:>9.1f}".format(*gib), "", layout_name(config), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
