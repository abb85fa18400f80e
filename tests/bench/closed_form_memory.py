"""`python -m tests.bench.closed_form_memory`: `costs.memory` against the compiler, on H100s that are not there.

Compiles the training step of every row on a CPU with JAX's CUDA plugin and prints GiB per GPU in closed form and in
XLA's plan: what lasts (arguments) and what a step needs on top (temporaries). The numbers in `ROWS` are such a run's
(jax 0.10.2).
"""

from __future__ import annotations

import sys
from typing import NamedTuple

import jax

from megajax.config import InputError
from megajax.costs.memory import GIB, heaviest
from megajax.planning.deviceless import compile_step
from tests.bench.deviceless_memory import NODES_16, mesh_sizes, published


class Row(NamedTuple):
    """A layout, and GiB per GPU in XLA's plan."""

    preset: str
    words: str
    """Of a command line."""
    arguments: float
    temporary: float


SMALL = (
    Row("gpt3_1.3b", "train.remat=none train.micro_batch_size=2 train.global_batch_size=8", 14.71, 26.80),
    Row("llama3_8b", "parallel.tensor=8 train.remat=[qkv,mlp_hidden] train.global_batch_size=8", 11.22, 10.50),
    Row("gpt3_1.3b", "parallel.data=8 train.micro_batch_size=4 train.global_batch_size=32", 14.71, 13.46),
    Row(
        "gpt3_1.3b",
        "parallel.data=8 parallel.zero=1 train.remat=full train.micro_batch_size=8 train.global_batch_size=256",
        1.85,
        13.30,
    ),
    Row("gpt3_1.3b", "train.precision=fp32 train.micro_batch_size=2 train.global_batch_size=8", 14.71, 19.76),
    Row(
        "gpt3_2.7b",
        "train.attention=xla parallel.tensor=2 train.micro_batch_size=2 train.global_batch_size=8",
        14.82,
        15.03,
    ),
    Row(
        "gpt3_6.7b",
        "parallel.tensor=4 parallel.data=2 parallel.zero=1 parallel.sequence_parallel=false train.micro_batch_size=2 "
        "train.global_batch_size=16",
        9.31,
        17.01,
    ),
    Row("llama2_7b", "parallel.pipe=2 parallel.fsdp=4 train.global_batch_size=32", 9.42, 33.49),
    Row(
        "llama2_7b",
        "parallel.pipe=2 parallel.context=2 parallel.tensor=2 parallel.chunks=4 train.global_batch_size=8",
        18.83,
        17.23,
    ),
    Row("llama3_8b", "parallel.fsdp=8 train.micro_batch_size=1 train.global_batch_size=32", 11.22, 35.55),
    Row(
        "llama3_8b",
        "parallel.context=4 parallel.fsdp=2 train.attention=ring train.global_batch_size=8",
        44.87,
        42.28,
    ),
    Row("gpt3_13b", "parallel.pipe=4 parallel.tensor=2 parallel.chunks=2 train.global_batch_size=16", 18.00, 20.25),
)
LARGE = (
    Row("megatron_22b", "parallel.tensor=8 train.micro_batch_size=4", 30.85, 16.72),
    Row("megatron_175b", NODES_16, 30.53, 33.32),
    Row("megatron_175b", f"{NODES_16} train.remat=full", 30.53, 27.22),
    Row("megatron_175b", f"{NODES_16} parallel.chunks=3", 30.53, 28.71),
    Row("megatron_175b", f"{NODES_16} parallel.chunks=3 train.remat=full", 30.53, 21.81),
    Row(
        "megatron_530b",
        f"{NODES_16} parallel.pipe=35 parallel.data=8 parallel.chunks=3 train.global_batch_size=2240",
        21.22,
        26.43,
    ),
    Row("megatron_1t", f"{NODES_16} parallel.pipe=64 parallel.data=6 train.global_batch_size=3072", 22.09, 47.21),
)
ROWS = (*SMALL, *LARGE)


def main() -> int:
    """Print the table; 2 if there is nothing to compile with."""
    jax.config.update("jax_platforms", "cpu")
    print(f"{'':<14}{'arguments, GiB':^27}{'temporary, GiB':^27}")
    print(f"{'model':<14}" + f"{'closed':>9}{'XLA':>9}{'':>9}" * 2, " layout")
    for row in ROWS:
        config = published(row.preset, row.words)
        memory = heaviest(config, mesh_sizes(config))
        try:
            plan = compile_step(config, "H100").step.memory_analysis()
        except InputError as error:
            print(error, file=sys.stderr)
            return 2
        pairs = (
            (memory.persistent, plan.argument_size_in_bytes),
            (memory.temporary, plan.temp_size_in_bytes),
        )
        columns = (f"{closed / GIB:>9.2f}{xla / GIB:>9.2f}{closed / xla - 1:>+9.1%}" for closed, xla in pairs)
        print(f"{row.preset:<14}" + "".join(columns), "", row.words, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
