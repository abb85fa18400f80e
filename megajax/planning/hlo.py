"""HLO text, the form in which XLA shows a compiled program: its instructions, their loops and their FLOPs.

    compiled = step.lower(state, batch).compile()
    for line in executed(compiled):
        line.instruction.opcode, line.loop
    flops = executed_flops(compiled)

The text is read, and not XLA's own data structures, because every version of JAX gives the text.

A multiply-add is 2 FLOPs. Nothing else counts, not even products that XLA turned into other instructions (a vector
times a matrix). A fused attention kernel counts by the products that it computes: two of scores forward, five backward
(2205.14135), of half of the scores under a causal mask. Masked slots of a pipeline run like others, and count.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from math import prod
from typing import NamedTuple

import jax

Shape = tuple[int, ...]
UNKNOWN = 0
"""Number of iterations recorded for a loop whose true number depends on data."""


class Instruction(NamedTuple):
    """An instruction of a program, `%name = type opcode(operands), attributes`."""

    name: str
    type: str
    opcode: str
    operands: str
    attributes: str
    root: bool = False
    """Whether its result is that of its computation."""

    @property
    def calls(self) -> list[str]:
        """Return the names of the computations that the instruction runs.

        The computation by which a reduction or a sort combines two numbers is left out.
        """
        applied = "to_apply|" if self.opcode == "call" else ""
        found = re.findall(rf"(?:{applied}calls|body|condition|\w+_computations?)=(\{{.*?\}}|[^ ,]+)", self.attributes)
        return [name for names in found for name in re.findall(r"[\w.\-]+", names)]

    @property
    def arrays(self) -> list[tuple[Shape, str]]:
        """Return shape and dtype of every array in the type of the instruction."""
        return arrays(self.type)

    @property
    def results(self) -> list[tuple[Shape, str]]:
        """Return shape and dtype of every array that the instruction makes.

        The type of a start may be that of its results, or hold operands, results and XLA's own values, in this order
        except for copies.
        """
        if not self.opcode.endswith("-start") or len(self.arrays) == len(self.operand_names):
            return self.arrays
        parts = _entries(self.type)
        return arrays(parts[0 if self.opcode == "copy-start" else 1])

    @property
    def trips(self) -> int:
        """Return the number of turns of a loop, or UNKNOWN if it depends on data."""
        return int(find(r'"known_trip_count":\{"n":"(\d+)"', self.attributes) or UNKNOWN)

    @property
    def body(self) -> str:
        """Return the name of the computation that a loop repeats."""
        return find(r"\bbody=%?([\w.\-]+)", self.attributes)

    @property
    def operand_names(self) -> list[str]:
        """Return the names of the instructions whose results are its operands."""
        return re.findall(r"%([\w.\-]+)", self.operands)

    @property
    def origin(self) -> str:
        """Return XLA's `op_name`, the JAX functions from which the instruction comes; empty if XLA made it."""
        return find(r'op_name="([^"]*)"', self.attributes)


@dataclass(frozen=True)
class Program:
    """The text of a compiled program: the instructions of its computations in the order in which they run."""

    name: str
    """Name of the program, such as "jit_step"."""
    computations: Mapping[str, Sequence[Instruction]]
    entry: str
    """Name of the computation that is the whole program."""
    frames: Mapping[int, str]
    """Frames of the Python stack by number, as "file:line function"; empty if JAX writes source lines instead."""

    @classmethod
    def of(cls, text: str) -> Program:
        """Read a program, `jax.jit(f).lower(...).compile().as_text()`."""
        computations, entry = _parse(text)
        return cls(find(r"HloModule ([\w.\-]+)", text), computations, entry, _frames(text))

    def with_sources(self, computation: str, around: str) -> Iterator[tuple[Instruction, str]]:
        """Yield the instructions of a computation with their sources.

        A source is the JAX functions from which an instruction comes (XLA's `op_name`). If XLA made the instruction or
        moved it out of a loop, they are those of the loop around it, which are `around` here.
        """
        origins: dict[str, str] = {}
        for line in self.computations[computation]:
            origin = origins[line.name] = self._origin(line, origins, around)
            yield line, origin if origin.startswith(around) and not self._moved(origin, around) else around

    @cached_property
    def _loops(self) -> set[str]:
        """Origins of all loops."""
        return {line.origin for lines in self.computations.values() for line in lines if line.opcode == "while"}

    def _moved(self, origin: str, around: str) -> bool:
        """Tell whether an instruction comes from a loop that is not around it; unrolled loops do not count."""
        names = (origin[: end.end()] for end in re.finditer("/while(?=/)", origin))
        return any(name in self._loops and not around.startswith(name) for name in names)

    def _origin(self, line: Instruction, origins: Mapping[str, str], around: str) -> str:
        """Return an instruction's own origin, or that of an operand (XLA joins collectives), or the commonest in a
        loop's body.
        """
        if line.origin:
            return line.origin
        if line.opcode != "while":
            return next((found for name in line.operand_names if (found := origins.get(name))), "")
        inside = (one.origin for one in self.computations[line.body])
        starts = (re.match(re.escape(around) + ".*?/while(?=/)", origin) for origin in inside)
        return max(Counter(start[0] for start in starts if start).items(), key=lambda item: item[1], default=("", 0))[0]

    def named(self, computation: str) -> Mapping[str, Instruction]:
        """Return the instructions of a computation by name."""
        return self._named[computation]

    def root(self, computation: str) -> Instruction:
        """Return the instruction whose result is that of a computation."""
        return next(line for line in self.computations[computation] if line.root)

    @cached_property
    def _named(self) -> dict[str, dict[str, Instruction]]:
        return {name: {line.name: line for line in lines} for name, lines in self.computations.items()}

    def source_line(self, line: Instruction) -> str:
        """Return the Python line from which an instruction comes ("models/block.py:88"), or "" if XLA made it."""
        if number := find(r"stack_frame_id=(\d+)", line.attributes):
            return self.frames.get(int(number), "")
        file, number = (find(rf"source_{key}=\"?([^ \"}}]+)", line.attributes) for key in ("file", "line"))
        return f"{file}:{number}" if file else ""


def _frames(text: str) -> dict[int, str]:
    """Return the stack frames from the tables of files, locations and frames at the beginning of newer programs."""
    tables: dict[str, dict[str, str]] = {name: {} for name in ("FileNames", "FileLocations", "StackFrames")}
    rows: dict[str, str] = {}
    for line in text.splitlines():
        if re.match(r"\w+$", line):
            rows = tables.get(line, {})
        elif found := re.match(r"(\d+) (.*)", line):
            rows[found[1]] = found[2]
        elif line.startswith(("%", "ENTRY")):
            break
    places: dict[str, str] = {}
    for place, row in tables["FileLocations"].items():
        file, _, number = integers(row)[:3]
        places[place] = f"{tables['FileNames'][str(file)][1:-1]}:{number}"
    return {int(frame): places[str(integers(row)[0])] for frame, row in tables["StackFrames"].items()}


class Executed(NamedTuple):
    """An instruction that a program executes, with the loops around it."""

    instruction: Instruction
    types: Mapping[str, str]
    """Types of the instructions in the same computation, by name."""
    loop: tuple[int, ...]
    """Iterations of the loops around it, outermost first; UNKNOWN if they depend on data."""
    conditional: bool
    """Whether it is in a branch, and therefore executed at most that often."""
    source: str
    """JAX functions from which the instruction comes (XLA's `op_name`).

    If XLA made it or moved it, they are those of the loop around it.
    """

    @property
    def operands(self) -> list[list[tuple[Shape, str]]]:
        """Return shape and dtype of the arrays of every operand."""
        return [arrays(self.types[name]) for name in self.instruction.operand_names]


def executed(program: jax.stages.Compiled | str) -> Iterator[Executed]:
    """Yield every instruction that a run of a program executes, including those of called computations.

    Args:
        program: `jax.jit(f).lower(...).compile()`, or its `as_text()`.
    """
    read = Program.of(program if isinstance(program, str) else str(program.as_text()))

    def walk(name: str, loop: tuple[int, ...], conditional: bool, source: str) -> Iterator[Executed]:
        types = {line.name: line.type for line in read.computations[name]}
        for line, here in read.with_sources(name, source):
            yield Executed(line, types, loop, conditional, here)
            repeats = line.opcode == "while"
            inside = (*loop, line.trips) if repeats else loop
            if not line.opcode.endswith(("-done", "-update")):
                for called in line.calls:
                    within = f"{here}/body" if repeats else here
                    yield from walk(called, inside, conditional or line.opcode == "conditional", within)

    return walk(read.entry, (), False, "")


def arrays(type_: str) -> list[tuple[Shape, str]]:
    """Return shape and dtype of every array in a type.

    `(bf16[2,3]{1,0}, f32[])` -> ((2, 3), "bf16"), ((), "f32").
    """
    return [(integers(sizes), dtype) for dtype, sizes in re.findall(r"(\w+)\[([\d,]*)\]", type_)]


def _entries(type_: str) -> list[str]:
    """Return the entries of a tuple's type: `((f32[2], s32[]), bf16[3]{0}, u32[])` has three."""
    depth, entries = 0, [""]
    for letter in type_.strip()[1:-1]:
        depth += {"(": 1, "[": 1, "{": 1, ")": -1, "]": -1, "}": -1}.get(letter, 0)
        if letter == "," and not depth:
            entries.append("")
        else:
            entries[-1] += letter
    return entries


def width(dtype: str) -> float:
    """Return the bytes of a number with XLA's dtype, such as "bf16", "f8e4m3fn" or "pred"; a token has none."""
    if dtype in ("token", "opaque"):
        return 0.0
    return 1.0 if dtype == "pred" else integers(dtype)[0] / 8


def integers(text: str) -> tuple[int, ...]:
    """Return all whole numbers in a text."""
    return tuple(map(int, re.findall(r"\d+", text)))


def find(pattern: str, text: str) -> str:
    """Return the first group of the first match, or an empty text if there is none."""
    return found[1] if (found := re.search(pattern, text)) else ""


def _parse(text: str) -> tuple[dict[str, list[Instruction]], str]:
    """Return the instructions of every computation, and the name of the entry computation."""
    computations: dict[str, list[Instruction]] = {}
    entry = name = ""
    for line in text.splitlines():
        if header := re.match(r"(ENTRY )?%?([\w.\-]+) .*\{$", line):
            name = header[2]
            computations[name] = []
            entry = name if header[1] else entry
        elif found := re.match(r"\s+(ROOT )?%?(\S+) = (.*?) ([a-z][a-z0-9\-]*)\((.*?)\)(.*)", line):
            parts = found[2], found[3], found[4], found[5], found[6]
            computations[name].append(Instruction(*parts, root=bool(found[1])))
    return computations, entry


ATTENTION_PRODUCTS = {"__cudnn$fmhaSoftmax": 2, "__cudnn$fmhaSoftmaxBackward": 5}
"""Kernel of fused attention, without the parts of its name for bias and dropout -> number of matrix products."""


def executed_flops(
    program: jax.stages.Compiled | str, unknown: int | None = None, taken: Fraction = Fraction(1)
) -> int:
    """Count the FLOPs of matrix products of one run on one device.

    Args:
        program: `jax.jit(f).lower(...).compile()`, or its `as_text()`.
        unknown: number of iterations to assume for every loop whose number depends on data; None = products in such a
            loop are an error.
        taken: share of its executions in which a branch with matrix products is taken.

    Raises:
        ValueError: there are matrix products in such a loop, or a kernel of unknown FLOPs.
    """
    total = Fraction(0)
    for line in executed(program):
        if flops := _flops(line):
            if UNKNOWN in line.loop and unknown is None:
                raise ValueError(f"loop {line.source!r} multiplies an unknown number of times: say how often")
            times = prod(trips if trips != UNKNOWN else unknown or 0 for trips in line.loop)
            total += flops * times * (taken if line.conditional else 1)
    return round(total)


def _flops(line: Executed) -> int:
    """Return the FLOPs of one execution of an instruction."""
    attributes = line.instruction.attributes
    if line.instruction.opcode == "dot":
        return _product(line, integers(find(r"lhs_contracting_dims=\{([\d,]*)\}", attributes)))
    target = find(r'custom_call_target="([^"]*)"', attributes)
    if target.startswith("__cublas$"):
        return _product(line, integers(find(r'"lhs_contracting_dimensions":\[([^\]]*)\]', attributes.replace(" ", ""))))
    if target.startswith("__cudnn$fmha"):
        return fmha_flops(line.instruction, target)
    if re.search("gemm|matmul|conv", target):
        raise ValueError(f"kernel {target!r} multiplies nobody knows how much: add it to {__name__}")
    return 0


def _product(line: Executed, contracted: tuple[int, ...]) -> int:
    """Return the FLOPs of a matrix product: 2 m n k, times the batch."""
    ((lhs, _),) = line.operands[0]
    result, _ = line.instruction.arrays[0]
    return 2 * prod(result) * prod(lhs[dim] for dim in contracted)


def fmha_flops(line: Instruction, target: str) -> int:
    """Return the FLOPs of cuDNN's fused attention `target` with scores [B, N, S, S].

    The head size H is the last dim of the first operand.
    """
    target = re.sub("ScaleBias|ScaleMask|Dropout|Bias", "", target)
    attributes = line.attributes.replace(" ", "")
    scores = integers(find(r'"intermediate_tensor_shape":\{.*?"dimensions":\[([^\]]*)\]', attributes))
    head = integers(find(r"operand_layout_constraints=\{\w+\[([\d,]*)\]", attributes))[-1]
    causal = find(r'"mask_type":"(\w+)"', attributes).endswith("CAUSAL")
    return ATTENTION_PRODUCTS[target] * 2 * prod(scores) * head // (2 if causal else 1)
