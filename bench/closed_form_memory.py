"""`python -m bench.closed_form_memory`: `costs.memory` compared with the compiler, for absent H100s.

The training step of every row is compiled on a CPU with JAX's CUDA plugin. Printed are GiB per GPU in closed form and
in XLA's plan: memory that lasts (arguments) and memory that a step needs besides (temporaries). The numbers in
`tests.planning.compiled_memory.ROWS` come from such a run.
"""

from __future__ import annotations

import sys

import jax

from megajax.config import InputError
from megajax.costs.memory import GIB, heaviest
from megajax.planning.deviceless import compile_step
from tests.planning.compiled_memory import ROWS, mesh_sizes, published


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
