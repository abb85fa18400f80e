"""`python -m megajax.verify CONFIG [key=value ...] --devices 8`: check that every parallel layout computes the same.

It trains a few steps from the same weights on the same random samples under every layout that this many devices allow,
on simulated CPU devices, and compares initial weights, first gradients and losses with those of one device. What each
layout sends in a step is printed beside them. Model, optimizer, dropout, batch size and seed are those of the
configuration; its `parallel` section is what varies.

The losses have to stay together for a few steps, so the learning rate has to be one at which training is stable: at one
so high that the loss jumps about, rounding alone grows past the yardstick.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Sequence

from megajax.cluster.detect import require_one_process
from megajax.config import Config, InputError
from megajax.config.cli import entry_point, parse_command_line
from megajax.interop.init_from import start_of
from megajax.parallel.mesh import compile_fast, simulate_devices
from megajax.planning.collectives import OPS, Traffic
from megajax.planning.equivalence import (
    YARDSTICK,
    comparable,
    compare,
    every_layout,
    one_device,
    train_layout,
)
from megajax.planning.layouts import layout_name

SHORT = {op: "".join(word[0] for word in op.split("-")) for op in OPS}
"""Kind of collective -> its short name in the table: all-gather ag, all-reduce ar, reduce-scatter rs,
collective-permute cp, all-to-all ata."""


@entry_point
def main(argv: list[str]) -> int:
    """Run the command line and return 1 if a layout differs by more than the yardstick allows."""
    require_one_process("verification")

    def add_options(parser: argparse.ArgumentParser) -> None:
        parser.add_argument(
            "--devices", type=int, default=8, metavar="N", help="number of simulated CPU devices (default: 8)"
        )
        parser.add_argument("--steps", type=int, default=5, metavar="N", help="number of training steps (default: 5)")
        parser.add_argument(
            "--layouts",
            default="",
            metavar="WORDS",
            help="compare only layouts that have all these words in their name",
        )
        parser.add_argument(
            "--most", type=int, metavar="N", help="largest number of layouts to compare, spread over all"
        )

    title = "Compare every parallel layout with one device."
    loaded, options = parse_command_line("python -m megajax.verify", title, argv, start_of, add_options)
    for name in ("devices", "steps", "most"):
        if (value := getattr(options, name)) is not None and value < 1:
            raise InputError(f"--{name} is {value}: expected 1 or more")
    config, changes = comparable(loaded.config, options.devices)
    for change in changes:
        print(f"notice: {change}")
    layouts = choose_layouts(config, options.devices, options.layouts, options.most)
    compile_fast()
    simulate_devices(options.devices)
    return verify(config, layouts, options.steps)


def choose_layouts(config: Config, devices: int, words: str = "", most: int | None = None) -> list[Config]:
    """Return the legal layouts that have all `words` in their name, or `most` of them at even distances.

    Raises:
        InputError: there is no such layout.
    """
    legal = every_layout(config, devices)
    if not legal:
        raise InputError(f"no layout of {devices} devices is legal: change --devices, the batch size or the model")
    layouts = [layout for layout in legal if all(word in layout_name(layout) for word in words.split())]
    if not layouts:
        example = layout_name(legal[len(legal) // 2])
        raise InputError(f"no layout of {devices} devices has {words!r} in its name; one is called {example!r}")
    most = min(most or len(layouts), len(layouts))
    return [layouts[i * len(layouts) // most] for i in range(most)]


def verify(config: Config, layouts: Sequence[Config], steps: int) -> int:
    """Print a row for each layout as soon as it is known; return 1 if one differs by more than the yardstick allows."""
    reference = train_layout(one_device(config), steps)
    losses = f"losses {reference.losses[0]:.4f} to {reference.losses[-1]:.4f}"
    print(f"{len(layouts)} layouts, {steps} steps each, against one device without accumulation ({losses})")
    print(f"yardstick: {YARDSTICK}\n")
    width = max(len(layout_name(layout)) for layout in layouts)
    print(f"{'layout':<{width}}  initial  gradient  loss     first departure; collectives of a step", flush=True)
    departed = 0
    for layout in layouts:
        outcome = train_layout(layout, steps)
        far = compare(outcome, reference)
        departed += bool(far.departures)
        first = f"{far.departures[0]} and {len(far.departures) - 1} more" if far.departures else "none"
        numbers = f"{far.initial:<7.2g}  {far.gradients:<8.1e}  {far.losses:<7.1e}"
        print(f"{layout_name(layout):<{width}}  {numbers}  {first}; {describe(outcome.traffic)}", flush=True)
    print(f"\n{departed} of {len(layouts)} layouts depart" if departed else "\nall layouts agree with one device")
    return int(departed > 0)


def describe(traffic: Traffic) -> str:
    """Write how often each collective runs in a step, by mesh axes: `data: 9 ar; tensor: 14 ag 8 rs`."""
    counts = Counter[tuple[tuple[str, ...], str]]()
    for record in traffic:
        if record.axes:  # a group of one device sends nothing
            counts[record.axes, record.op] += record.count
    by_axes: dict[str, list[str]] = {}
    for (axes, op), count in sorted(counts.items()):
        by_axes.setdefault("+".join(axes), []).append(f"{count} {SHORT[op]}")
    return "; ".join(f"{axes}: {' '.join(ops)}" for axes, ops in by_axes.items())


if __name__ == "__main__":
    sys.exit(main())
