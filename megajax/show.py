"""`python -m megajax.show CONFIG [key=value ...] [--devices N]`: show how every parameter is sharded.

Shapes come from `jax.eval_shape` and shards from the rule table on an abstract mesh, both as in training, so that a
laptop can tell what each of 3,072 GPUs would hold. `--schedule` draws the pipeline's timeline instead, and `--svg FILE`
writes that as a picture too. `--explain NAME` tells of one parameter why it lies as it does and what that sends.
"""

from __future__ import annotations

import argparse
import math
import re
import shutil
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

import jax
from jax.sharding import AbstractMesh, AxisType, NamedSharding
from rich.console import Console
from rich.table import Table

from megajax.config import Config, InputError, ParallelConfig, check_batch, check_config, resolve_mesh
from megajax.config.cli import entry_point, parse_command_line
from megajax.config.parallel import AXES
from megajax.costs.device import Device
from megajax.costs.weights import parameter_count
from megajax.files import write_text
from megajax.interop.init_from import start_of
from megajax.models.parameters import logical_axes, named_leaves
from megajax.parallel.pipeline.schedule import Schedule, interleaved
from megajax.parallel.rules import Rule, Rules
from megajax.planning.drawing import draw_svg, draw_text
from megajax.planning.explain import causes
from megajax.planning.plan import with_vocabulary
from megajax.training.state import TrainState, init_state, optimizer_for


class ShardedParameter(NamedTuple):
    """A parameter and the part of it that a device holds."""

    name: str
    shape: tuple[int, ...]
    rules: tuple[Rule, ...]
    """Rule of every dimension: its logical axis, the mesh axes that split it, and the reason."""
    shard: tuple[int, ...]
    """Shape of the part on one device."""
    shard_bytes: int


class Sharding(NamedTuple):
    """List the arrays that a device holds, in bytes unless said otherwise."""

    mesh: dict[str, int]
    parameters: list[ShardedParameter]
    model_size: int
    """Number of parameters of the whole model, without the vocabulary's padding."""
    weights: int
    gradients: int
    optimizer: int


@entry_point
def main(argv: list[str]) -> None:
    """Run the command line and print a table, an explanation or a timeline."""

    def add_options(parser: argparse.ArgumentParser) -> None:
        parser.add_argument(
            "--devices", type=int, metavar="N", help="number of devices of the mesh (default: as few as it takes)"
        )
        parser.add_argument(
            "--explain", metavar="NAME", help="explain one parameter: its rules, and the collectives that it causes"
        )
        parser.add_argument("--schedule", action="store_true", help="draw what the pipeline's stages do, and when")
        parser.add_argument("--svg", type=Path, metavar="FILE", help="with --schedule: write the drawing here as well")

    title = "Show how the model is sharded, without any device."
    loaded, options = parse_command_line("python -m megajax.show", title, argv, start_of, add_options)
    if options.schedule:
        schedule = schedule_of(loaded.config, options.devices)
        if options.svg:
            write_text(options.svg, draw_svg(schedule))
        print(draw_text(schedule, shutil.get_terminal_size((200, 0)).columns), end="")
    elif options.svg:
        raise InputError("--svg draws the pipeline's schedule: give --schedule as well")
    elif options.explain:
        print_explanation(loaded.config, sharding_of(loaded.config, options.devices), options.explain)
    else:
        print_sharding(sharding_of(loaded.config, options.devices))


def sharding_of(config: Config, devices: int | None = None) -> Sharding:
    """Return the part of the model that each of `devices` devices holds.

    Unset, there are `parallel.simulate_devices` devices, or those of one replica.

    Raises:
        InputError: the mesh does not take that many devices, or does not divide a parameter.
    """
    parallel, sizes = config.parallel, _mesh_sizes(config.parallel, devices)
    mesh = AbstractMesh(tuple(sizes.values()), tuple(sizes), axis_types=(AxisType.Auto,) * len(sizes))
    rules = Rules.of(mesh, parallel, config.model)
    config = with_vocabulary(config)
    state = jax.eval_shape(lambda: init_state(jax.random.key(0), config, optimizer_for(config.optim, config.model)))
    shardings: TrainState = rules.shardings(state)
    pairs = zip(named_leaves(state.params), jax.tree.leaves(shardings.params), strict=True)
    parameters = [
        ShardedParameter(
            name,
            leaf.shape,
            tuple(rules.rule(axis) for axis in logical_axes(leaf) if axis),
            sharding.shard_shape(leaf.shape),
            _shard_bytes(leaf, sharding),
        )
        for (name, leaf), sharding in pairs
    ]
    weights = sum(parameter.shard_bytes for parameter in parameters)
    optimizer = jax.tree.map(_shard_bytes, state.opt_state, shardings.opt_state)
    # Gradients add up in the dtype of the parameters, whole over `data`, which they cross once, at the end of a step.
    gradients = jax.tree.map(_shard_bytes, state.params, replace(rules, zero=0).shardings(state.params))
    gradient_bytes, optimizer_bytes = (sum(jax.tree.leaves(tree)) for tree in (gradients, optimizer))
    return Sharding(sizes, parameters, parameter_count(config.model), weights, gradient_bytes, optimizer_bytes)


def schedule_of(config: Config, devices: int | None = None) -> Schedule:
    """Return the pipeline's schedule for a step of the (full) global batch, on as many devices as in `sharding_of`.

    Raises:
        InputError: the mesh does not take that many devices, or its replicas cannot share the batch.
    """
    data = _mesh_sizes(config.parallel, devices)["data"]
    check_batch(config.train, config.parallel, data)
    config = replace(config, parallel=replace(config.parallel, data=data))
    return interleaved(config.parallel.pipe, config.parallel.chunks, Device.of(config).microbatches)


def _mesh_sizes(parallel: ParallelConfig, devices: int | None) -> dict[str, int]:
    if devices is None:
        one_replica = math.prod(size for axis in AXES if (size := getattr(parallel, axis)) != "auto")
        devices = parallel.simulate_devices or one_replica
    if devices < 1:
        raise InputError(f"--devices is {devices}: expected 1 or more")
    return resolve_mesh(parallel, devices)


def _shard_bytes(leaf: Any, sharding: NamedSharding) -> int:
    return math.prod(sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize


def print_sharding(sharding: Sharding) -> None:
    """Print the parameters, the rules they matched and the sums.

    No line is broken if the output is no terminal.
    """
    console = _console()
    mesh = " x ".join(f"{axis} {size}" for axis, size in sharding.mesh.items())
    console.print(f"{sharding.model_size:,} parameters on {math.prod(sharding.mesh.values()):,} device(s): {mesh}")
    for table in (_parameters(sharding), _rules(sharding), _sums(sharding)):
        console.print("", table, sep="\n")


def print_explanation(config: Config, sharding: Sharding, name: str) -> None:
    """Print one parameter: the rule of every dimension, its part on a device, and the collectives that it causes.

    Raises:
        InputError: the model has no such parameter; the message lists those it has.
    """
    found = {p.name: p for p in sharding.parameters}
    parameter = found.get(re.sub(r"^layers\.", "blocks.", name))
    if parameter is None:
        raise InputError(f"--explain {name}: no such parameter; choose one of {', '.join(found)}")
    mesh, rules = sharding.mesh, _table("dimension", "logical axis", "at rest", "in compute", "why")
    for size, rule in zip(parameter.shape, parameter.rules, strict=True):
        at_rest, in_compute = (" ".join(f"{axis} {mesh[axis]}" for axis in axes) or "-" for axes in rule[1:3])
        rules.add_row(f"{size:,}", rule.logical, at_rest, in_compute, rule.why)
    sent = _table("collectives of a step", "what", "over", "count", "MiB each", "MiB")
    config = with_vocabulary(replace(config, parallel=replace(config.parallel, data=mesh["data"])))
    check_config(config)
    for cause in causes(config, mesh, parameter.name, parameter.shape, parameter.rules):
        each = cause.bytes / 2**20
        numbers = f"{cause.count:,}", f"{each:,.3f}", f"{cause.count * each:,.3f}"
        sent.add_row(cause.op, cause.what, f"{cause.axis} {mesh[cause.axis]}", *numbers)
    console = _console()
    console.print(f"{parameter.name}: {math.prod(parameter.shape):,} numbers", rules, sep="\n\n")
    shard = " x ".join(map(str, parameter.shard))
    console.print(f"\na device holds {shard} of it: {parameter.shard_bytes:,} bytes in fp32, without optimizer state\n")
    console.print(sent if sent.rows else "it causes no collectives: nothing shares it, or its gradient")


def _console() -> Console:
    return Console(width=None if sys.stdout.isatty() else 1000, highlight=False)


def _parameters(sharding: Sharding) -> Table:
    table = _table("parameter", "shape", "logical axes", "mesh axes at rest", "per device", "MiB per device")
    for p in sharding.parameters:
        at_rest = [" ".join(f"{axis} {sharding.mesh[axis]}" for axis in rule.at_rest) or "-" for rule in p.rules]
        columns = (p.shape, [rule.logical for rule in p.rules], at_rest, p.shard)
        table.add_row(p.name, *(", ".join(map(str, column)) for column in columns), f"{p.shard_bytes / 2**20:,.3f}")
    return table


def _rules(sharding: Sharding) -> Table:
    table = _table("rule", "at rest", "in compute", "why")
    for rule in dict.fromkeys(rule for parameter in sharding.parameters for rule in parameter.rules):
        table.add_row(rule.logical, " ".join(rule.at_rest) or "-", " ".join(rule.in_compute) or "-", rule.why)
    return table


def _sums(sharding: Sharding) -> Table:
    table = _table("fp32", "GiB per device")
    for what, size in (
        ("weights", sharding.weights),
        ("gradients", sharding.gradients),
        ("optimizer state", sharding.optimizer),
        ("together", sharding.weights + sharding.gradients + sharding.optimizer),
    ):
        table.add_row(what, f"{size / 2**30:,.3f}")
    return table


def _table(*columns: str) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for i, column in enumerate(columns):
        justify: Literal["left", "right"] = "right" if "iB" in column else "left"
        table.add_column(column, overflow="fold", no_wrap=i == 0, justify=justify)
    return table


if __name__ == "__main__":
    sys.exit(main())
