"""`python -m bench.contracts [FAMILY ...] [--layout NAME ...]`: closed form and compiled program, family by family.

The real step of a few layers of real width is compiled for absent H100s, with every kind of layout, and the program is
compared with the plan: FLOPs of matrix products and memory of a device, bytes over every mesh axis in every loop,
nothing over `tensor` that is larger than the activations between two layers, and no unused inputs of the step. A line
for each is printed, which tells how it breaks the contract, if it does. The exit code is 1 if any does.

Experts of a mixture are assumed to be used alike, because the router decides the length of their loops.
"""

from __future__ import annotations

import argparse
import sys

from megajax.config import InputError
from tests.planning.contracts import FAMILIES, LAYOUTS, breaches, contract, hoisted


def main(argv: list[str]) -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(prog="python -m bench.contracts", description=__doc__)
    parser.add_argument("families", nargs="*", choices=(*FAMILIES, []), help="default: all")
    parser.add_argument("--layout", action="append", choices=tuple(LAYOUTS), help="default: all that apply")
    parser.add_argument("--programs", action="store_true", help="print the collectives of every program")
    options = parser.parse_args(argv)
    rows = [(family, layout) for family in options.families or FAMILIES for layout in options.layout or LAYOUTS]
    broken = False
    for family, layout in rows:
        refused = layout in FAMILIES[family].refused
        try:
            compiled = contract(family, layout)
        except InputError as error:
            print(f"{family:<8} {layout:<20} {'refused: ' if refused else ''}{error}", flush=True)
            broken |= not refused
            continue
        moved = hoisted(compiled.plan)
        cells = [
            f"{name} {compiled.deviation(name):+.1%}{' (hoisted)' * (name in moved)}" for name in compiled.comparison
        ]
        found = [*breaches(family, compiled), *(["not refused"] if refused else [])]
        broken |= bool(found)
        print(f"{family:<8} {layout:<20} {', '.join(cells)}; {'; '.join(found) or 'kept'}", flush=True)
        if options.programs:
            print(f"{compiled}\n", flush=True)
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
