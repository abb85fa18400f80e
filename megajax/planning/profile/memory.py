"""Memory over time: the arrays that a program holds while it runs, and those that it holds at the peak.

An array lives from the instruction that makes it to the last one that uses it. Views (tuples, bitcasts), the carries of
loops, and slices that are updated in place have no memory of their own. Arguments and results of the program are not
temporary: XLA reports them separately.

XLA's own assignment (`memory_analysis`) packs arrays into one allocation, which can waste a little; it gives a sum
without names. Both are printed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from megajax.planning.hlo import Instruction, Program, find, integers
from megajax.planning.profile.prices import UPDATES, VIEWS, WRAPPERS, size_of


class Held(NamedTuple):
    """An array that is held at some time."""

    instruction: Instruction
    bytes: float


@dataclass(frozen=True)
class Moment:
    """The arrays that exist while an instruction runs."""

    instruction: Instruction
    bytes: float
    held: tuple[Held, ...]


Array = tuple[str, int]
"""Array of a program: the name of the instruction that makes it, and its place among the results."""
Tree = tuple["Tree", ...] | list[Array] | None
"""Arrays of a value: a list of one, a tuple of such, or None for memory of others.

Memory of others belongs to arguments, carries and results.
"""


class Memory:
    """Follow the temporary memory of a program."""

    def __init__(self, program: Program) -> None:
        self._program = program

    @cached_property
    def peak(self) -> Moment:
        """Return the moment at which most memory is held, with its arrays, the largest first."""
        bytes_, line, held = max(self._moments(self._program.entry), key=lambda moment: moment[0])
        return Moment(line, bytes_, tuple(sorted(held, key=lambda array: -array.bytes)))

    def moments(self) -> Iterator[tuple[Instruction, float]]:
        """Yield every instruction with the bytes held while it runs, and the bodies of loops once, in their places."""
        for bytes_, line, _ in self._moments(self._program.entry):
            yield line, bytes_

    def _moments(self, computation: str) -> Iterator[tuple[float, Instruction, tuple[Held, ...]]]:
        lines = self._program.computations[computation]
        trees, owned = _trees(lines, self._program)
        ends = _ends(lines, trees)
        live: dict[Array, Held] = {}
        for number, line in enumerate(lines):
            for array, size in owned.get(line.name, {}).items():
                if array in ends:
                    handed = _handed_over(line, size, number, trees, live, ends)
                    live = {key: held for key, held in live.items() if key != handed} | {array: Held(line, size)}
            around = tuple(live.values())
            size = sum(held.bytes for held in around)
            inside = line.calls if line.opcode in ("while", "call", "conditional") else []
            for name in inside:
                for more, inner, held in self._moments(name):
                    yield size + more, inner, around + held
            if not inside:
                yield size, line, around
            live = {array: held for array, held in live.items() if ends[array] > number}


def _trees(lines: Sequence[Instruction], program: Program) -> tuple[dict[str, Tree], dict[str, dict[Array, float]]]:
    """Return the arrays of every value, and the bytes of the arrays that every instruction makes."""
    trees: dict[str, Tree] = {}
    owned: dict[str, dict[Array, float]] = {}
    for line in lines:
        operands = [trees.get(name) for name in line.operand_names]
        if line.opcode in ("parameter", "constant", "after-all", "partition-id"):
            trees[line.name] = None
        elif line.opcode == "tuple":
            trees[line.name] = tuple(operands)
        elif line.opcode == "get-tuple-element":
            whole = operands[0]
            index = int(find(r"index=(\d+)", line.attributes))
            trees[line.name] = whole[index] if isinstance(whole, tuple) else whole
        elif line.opcode in VIEWS or line.opcode in ("while", "opt-barrier") or line.opcode.endswith("-done"):
            trees[line.name] = operands[0]
        elif (place := _in_place(line, program)) is not None:
            trees[line.name] = operands[place]
        else:
            handed = _handed_on(line, operands, program) if line.opcode == "conditional" else {}
            made = {(line.name, i): size_of([result]) for i, result in enumerate(line.results)}
            owned[line.name] = {array: size for array, size in made.items() if array[1] not in handed}
            leaves: tuple[Tree, ...] = tuple(handed.get(array[1], [array]) for array in made)
            trees[line.name] = leaves[0] if len(leaves) == 1 and not line.type.startswith("((") else leaves
    return trees, owned


def _in_place(line: Instruction, program: Program) -> int | None:
    """Return the operand in whose memory an instruction writes its result, or None if it makes a new array."""
    if line.opcode in UPDATES:
        return 0
    if line.opcode not in WRAPPERS:
        return None
    inside, root = program.named(line.calls[0]), program.root(line.calls[0])
    while root.opcode in VIEWS and root.operand_names[0] in inside:
        root = inside[root.operand_names[0]]
    if root.opcode not in UPDATES:
        return None
    target = inside[root.operand_names[0]]
    while target.opcode in VIEWS:
        target = inside[target.operand_names[0]]
    return integers(target.operands)[0] if target.opcode == "parameter" else None


def _handed_on(line: Instruction, operands: Sequence[Tree], program: Program) -> dict[int, Tree]:
    """Return the results of a conditional that a branch hands on as it was given them, with the arrays of the operands.

    The other branches write such a result into the memory of the operand. Tuples of tuples are left out.
    """
    handed: dict[int, Tree] = {}
    for name, given in zip(line.calls, operands[1:], strict=False):
        named, root = program.named(name), program.root(name)
        if root.opcode != "tuple" or len(root.operand_names) != len(line.results) or not isinstance(given, tuple):
            continue
        for i, entry in enumerate(named[entry] for entry in root.operand_names):
            if entry.opcode == "get-tuple-element" and named[entry.operand_names[0]].opcode == "parameter":
                handed.setdefault(i, given[int(find(r"index=(\d+)", entry.attributes))])
    return handed


def _ends(lines: Sequence[Instruction], trees: Mapping[str, Tree]) -> dict[Array, int]:
    """Return the number of the last instruction that uses each array; results belong to the caller of these lines."""
    ends: dict[Array, int] = {}
    named = {line.name: line for line in lines}
    for number, line in enumerate(lines):
        used = [line.name] if line.opcode == "get-tuple-element" else [line.name, *line.operand_names]
        # What is sent is read until it has arrived; a sum over devices takes the place of what is summed.
        if line.opcode.endswith("-done") and not line.opcode.startswith("all-reduce"):
            used += named[line.operand_names[0]].operand_names
        for name in used:
            for array in _leaves(trees.get(name)):
                ends[array] = number
    root = next(line for line in lines if line.root)
    results = set(_leaves(trees[root.name]))
    return {array: end for array, end in ends.items() if array not in results}


def _handed_over(
    line: Instruction,
    size: float,
    number: int,
    trees: Mapping[str, Tree],
    live: Mapping[Array, Held],
    ends: Mapping[Array, int],
) -> Array | None:
    """Return the operand whose memory a result of `size` bytes reuses, because no later instruction reads it, or None.

    Sums over devices and kernels that work on every entry separately do so.
    """
    if not (line.opcode.startswith("all-reduce") or "kind=kLoop" in line.attributes or "scatter" in line.name):
        return None
    used = (array for name in line.operand_names for array in _leaves(trees.get(name)))
    return next(
        (array for array in used if array in live and ends[array] == number and live[array].bytes == size), None
    )


def _leaves(tree: Tree) -> Iterator[Array]:
    if isinstance(tree, tuple):
        for part in tree:
            yield from _leaves(part)
    elif tree is not None:
        yield from tree
