"""Traffic of a compiled program: every collective of its HLO text, by mesh axis, number of executions and bytes.

    traffic = collectives(step.lower(state, batch).compile(), mesh)
    print(traffic)
    layers = traffic.over("tensor").inside(M, L)  # M microbatches, L layers
    assert layers.forward().count("all-gather") == 2 * M * L

XLA writes one collective in several ways, all of which are read here: as one instruction (`all-gather`) or as a start
and a done (counted at the start); several tensors in one call (counted once per tensor); device groups as lists, as a
reshaped and transposed range, or as axes of a mesh of its own. Small all-reduces that XLA concatenates into one flat
tensor are one record, so compare bytes, not counts, where that matters. Loops of a single iteration are unrolled and
not seen as loops.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import pairwise
from math import prod
from typing import Literal, NamedTuple, get_args

import jax
import numpy as np
from jax.sharding import AbstractMesh, Mesh

from megajax.planning.hlo import UNKNOWN, Instruction, executed, find, integers, width

AnyMesh = Mesh | AbstractMesh
OPS = ("all-gather", "all-reduce", "reduce-scatter", "collective-permute", "all-to-all")
Place = Literal["layers forward", "layers backward", "each microbatch", "each step"]
"""Place of a collective in a training step.

It is the loop over the layers, forward or backward (recomputation there included), or else the loop over microbatches
or ticks of a pipeline, or none of these loops.
"""
PLACES: tuple[Place, ...] = get_args(Place)
LAYERS, TICKS = r"\blayers\)*/(while|rest)/", r"\b(microbatches|\w+_ticks)\)*/while/"
"""Patterns of loops in a source, by the scopes that models and `parallel` name.

Even an unrolled loop leaves this trace. Layers after the last whole pattern of kinds run beside their loop, as its
rest.
"""


def place_of(source: str) -> Place:
    """Return the loop of a training step to which an instruction with this source belongs."""
    if re.search(LAYERS, source):
        return "layers backward" if "transpose(" in source else "layers forward"
    return "each microbatch" if re.search(TICKS, source) else "each step"


@dataclass(frozen=True)
class Collective:
    """One tensor of a collective instruction, in which every device takes part."""

    op: str
    """Kind of the collective, one of OPS."""
    axes: tuple[str, ...]
    """Mesh axes along which the exchanging devices differ, in the mesh's order."""
    shape: tuple[int, ...]
    """Shape of the whole tensor.

    It is the result of an all-gather, or the operand of a reduce-scatter; in other collectives both are the same.
    """
    dtype: str
    """Dtype by XLA's name: "f32", "bf16"."""
    loop: tuple[int, ...]
    """Iterations of the loops around the collective, outermost first."""
    conditional: bool
    """Whether it is in a branch, and therefore executed at most `count` times."""
    source: str
    """JAX functions from which the collective comes (XLA's `op_name`).

    If XLA made it or moved it, they are those of the loop around it.
    """

    @property
    def count(self) -> int:
        """Return the number of executions in one run of the program."""
        return prod(self.loop)

    @property
    def place(self) -> Place:
        """Return the loop of a training step to which the collective belongs."""
        return place_of(self.source)

    @property
    def bytes(self) -> int:
        """Return the bytes of the whole tensor in one execution."""
        return int(prod(self.shape) * width(self.dtype))


@dataclass(frozen=True)
class Traffic:
    """The collectives of one run of a program; filters return another Traffic."""

    records: tuple[Collective, ...]

    def __iter__(self) -> Iterator[Collective]:
        return iter(self.records)

    def __len__(self) -> int:
        return len(self.records)

    def where(self, keep: Callable[[Collective], bool]) -> Traffic:
        """Return the collectives for which `keep` is true."""
        return Traffic(tuple(record for record in self if keep(record)))

    def over(self, *axes: str) -> Traffic:
        """Return the collectives that cross all these mesh axes, alone or together with others."""
        return self.where(lambda record: set(axes) <= set(record.axes))

    def inside(self, *loop: int) -> Traffic:
        """Return the collectives in exactly this nest of loops.

        Loops are given as iterations, outermost first; no argument means outside of loops.
        """
        return self.where(lambda record: record.loop == loop)

    def at(self, place: Place) -> Traffic:
        """Return the collectives in this loop of a training step."""
        return self.where(lambda record: record.place == place)

    def forward(self) -> Traffic:
        """Return the collectives that are not in the backward pass."""
        return self.where(lambda record: "transpose(" not in record.source)

    def backward(self) -> Traffic:
        """Return the collectives of the backward pass, its recomputation included."""
        return self.where(lambda record: "transpose(" in record.source)

    def of_at_least(self, size: int) -> Traffic:
        """Return the collectives whose whole tensor has at least `size` bytes."""
        return self.where(lambda record: record.bytes >= size)

    def count(self, op: str) -> int:
        """Return the number of executions of one of OPS in a run of the program."""
        return sum(record.count for record in self if record.op == op)

    def total_bytes(self) -> int:
        """Return the bytes of the whole tensors, over all executions."""
        return sum(record.count * record.bytes for record in self)

    def __str__(self) -> str:
        """Return a table of collectives, with the most bytes first and "<=" at those in a branch."""
        counts: Counter[Collective] = Counter()
        for record in self:
            counts[replace(record, source="")] += record.count
        rows = [("count", "op", "axes", "tensor", "MiB each", "MiB", "loops")]
        for record, count in sorted(counts.items(), key=lambda item: -item[0].bytes * item[1]):
            each = record.bytes / 2**20
            tensor = f"{record.dtype}[{','.join(map(str, record.shape))}]"
            loops = " x ".join(map(str, record.loop))
            number = f"<={count}" if record.conditional else str(count)
            rows.append((number, record.op, " ".join(record.axes), tensor, f"{each:.3f}", f"{each * count:.3f}", loops))
        columns = [
            [f"{cell:{side}{max(map(len, column))}}" for cell in column]
            for side, column in zip("><<<>><", zip(*rows, strict=True), strict=True)
        ]
        return "\n".join("  ".join(row).rstrip() for row in zip(*columns, strict=True))


def collectives(program: jax.stages.Compiled | str, mesh: AnyMesh) -> Traffic:
    """Return the collectives of a compiled program.

    Args:
        program: `jax.jit(f).lower(...).compile()`, or its `as_text()`.
        mesh: mesh for which it was compiled.

    Raises:
        ValueError: the program runs on another number of devices than the mesh has, or communicates in a loop whose
            number of iterations depends on data.
    """
    records = []
    for line in executed(program):
        op = line.instruction.opcode.removesuffix("-start")
        if op in OPS:
            if UNKNOWN in line.loop:
                raise ValueError(f"loop {line.source!r} communicates an unknown number of times: count it by hand")
            axes, _, tensors = exchange(line.instruction, op, mesh)
            for (shape, dtype), source in zip(tensors, _sources(line.source, len(tensors)), strict=True):
                records.append(Collective(op, axes, shape, dtype, line.loop, line.conditional, source))
    return Traffic(tuple(records))


class Exchange(NamedTuple):
    """The devices and tensors of one collective instruction."""

    axes: tuple[str, ...]
    """Mesh axes along which the exchanging devices differ."""
    groups: np.ndarray
    """Groups of devices that exchange, [groups, members], or [pairs, 2] for a permutation."""
    tensors: list[tuple[tuple[int, ...], str]]
    """Shape and dtype of the whole tensors."""


def exchange(line: Instruction, op: str, mesh: AnyMesh) -> Exchange:
    """Return the devices and tensors of a collective instruction of the kind `op`, one of OPS."""
    groups = _groups(line.attributes, mesh)
    return Exchange(_axes(groups, mesh), groups, _tensors(line, op, groups.shape[1]))


def _sources(name: str, count: int) -> list[str]:
    """Return the source of each of `count` tensors; if XLA joined collectives, `a/(b:c)/d` names one for each."""
    for start in (match.start() for match in re.finditer(r"\(", name)):
        depth, cuts = 0, [start]
        for place in range(start, len(name)):
            depth += {"(": 1, ")": -1}.get(name[place], 0)
            if depth == 0 or (depth == 1 and name[place] == ":"):
                cuts.append(place)
            if depth == 0:
                break
        if len(cuts) == count + 1 > 2:
            return [name[:start] + name[a + 1 : b] + name[cuts[-1] + 1 :] for a, b in pairwise(cuts)]
    return [name] * count


def _tensors(line: Instruction, op: str, ways: int) -> list[tuple[tuple[int, ...], str]]:
    """Return shape and dtype of the whole tensors that `ways` devices exchange."""
    dims = integers(find(r"dimensions=\{(.*?)\}", line.attributes))
    if op == "reduce-scatter":
        return [
            (tuple(size * ways if dim == dims[0] else size for dim, size in enumerate(shape)), dtype)
            for shape, dtype in line.results
        ]
    if op == "all-to-all" and not dims:  # the pieces of one tensor, one for every device
        shape, dtype = line.results[0]
        return [((ways, *shape), dtype)]
    return line.results


def _axes(groups: np.ndarray, mesh: AnyMesh) -> tuple[str, ...]:
    """Return the axes along which members of a group differ.

    Device i of the program is the i-th of the flattened mesh.
    """
    places = np.unravel_index(groups, tuple(mesh.shape.values()))
    return tuple(axis for axis, place in zip(mesh.shape, places, strict=True) if (place != place[:, :1]).any())


def _groups(attributes: str, mesh: AnyMesh) -> np.ndarray:
    """Return the groups of devices that exchange, [groups, members], or [pairs, 2] for a permutation."""
    if pairs := find(r"source_target_pairs=\{(\{.*?\})\}", attributes):
        return np.array(integers(pairs)).reshape(-1, 2)
    text = find(r"replica_groups=(mesh\[.*?\}|\[.*?\]<=\[.*?\](?:T\(.*?\))?|\{\{.*?\}\}|\{\})", attributes)
    if text.startswith("mesh"):
        groups = _mesh_groups(text)
    elif text.startswith("["):
        shape, ids = text.split("<=")
        groups = _range(ids).reshape(integers(shape))
    else:
        members = [integers(group) for group in re.findall(r"\{([\d,]+)\}", text)]
        groups = np.array(members or [tuple(range(mesh.size))])
    if groups.size != mesh.size:
        raise ValueError(
            f"the program runs on {groups.size} devices, the mesh has {mesh.size}: pass the program's mesh"
        )
    return groups


def _range(text: str) -> np.ndarray:
    """Return the range that `[4,8]T(1,0)` denotes: 0, 1, 2, ... in shape 4 x 8, transposed."""
    shape, _, order = text.partition("T")
    ids = np.arange(prod(integers(shape))).reshape(integers(shape))
    return ids.transpose(integers(order)) if order else ids


def _mesh_groups(text: str) -> np.ndarray:
    """Return the groups that `mesh['a'=2,'b'=8], device_ids=([8,2]T(1,0)) {'a','b':(2)4}` denotes.

    Here they are groups along a and the middle of b = 2 x 4 x 1.
    """
    axes, ids, members = re.findall(r"mesh\[(.*?)\](?:, device_ids=\((.*)\))? \{(.*)\}", text)[0]
    sizes = [(name, int(size)) for name, size in re.findall(r"'?(\w+)'?=(\d+)", axes)]
    chosen = re.findall(r"'?([A-Za-z_]\w*)'?(?::\((\d+)\)(\d+))?", members)
    shape: list[int] = []
    inside: list[int] = []
    for name, size in sizes:
        spans = [(int(low or 1), int(low or 1) * int(width or size)) for axis, low, width in chosen if axis == name]
        for low, high in pairwise(sorted({1, size, *(cut for span in spans for cut in span)})):
            if any(start <= low and high <= stop for start, stop in spans):
                inside.append(len(shape))
            shape.append(high // low)
    devices = np.array(integers(ids)) if ids and "[" not in ids else _range(ids or f"[{prod(shape)}]")
    ways = prod(shape[dim] for dim in inside)
    return np.moveaxis(devices.reshape(shape), inside, range(-len(inside), 0)).reshape(-1, ways)
