"""Prices of instructions: the seconds that each takes on a GPU while nothing runs beside it.

The time of a product follows from its FLOPs, that of an elementwise kernel from the bytes that it reads and writes, and
that of a collective from its bytes over NVLink or the network. `planning.operations` has the formulas, which the closed
form uses too. Only the sizes differ: here they are those of the program that XLA made, with every copy, cast and fusion
in it.

A kernel that takes a slice of an array reads only the slice, and one that updates a slice in place writes only the
slice. An unknown instruction is priced by its bytes and named in `Price.unknown`; it is never free.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from math import prod
from typing import Literal, NamedTuple

import numpy as np

from megajax.costs.hardware import Gpu
from megajax.planning.collectives import OPS, AnyMesh, exchange
from megajax.planning.hlo import Instruction, Program, Shape, find, fmha_flops, integers, width
from megajax.planning.operations import (
    LAUNCH,
    Numbers,
    attention_seconds,
    gather_seconds,
    matmul_seconds,
    memory_seconds,
    send_seconds,
)

Kind = Literal["matmul", "attention", "memory", "collective", "free"]
FREE = (
    "parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all", "partition-id", "replica-id",
    "opt-barrier", "domain",
)  # fmt: skip
"""Opcodes that run no kernel on the GPU."""
STREAMED = (
    "copy", "fusion", "transpose", "broadcast", "iota", "concatenate", "slice", "dynamic-slice",
    "dynamic-update-slice", "pad", "reduce", "select", "convert", "reshape", "reverse", "sort", "gather", "scatter",
    "rng-bit-generator", "compare", "reduce-window", "select-and-scatter", "clamp", "map", "add", "subtract",
    "multiply", "divide", "negate", "maximum", "minimum", "and", "or", "xor", "not", "exponential", "log", "sqrt",
    "rsqrt", "tanh", "power", "is-finite", "reduce-precision", "cbrt", "logistic", "floor", "ceil", "sign", "abs",
    "remainder",
)  # fmt: skip
"""Opcodes of kernels whose time follows from the bytes that they read and write."""
WRAPPERS = ("fusion", "fusion-start", "async-start", "call-start")
"""Opcodes of kernels whose work is in a computation of its own."""
DOT_DIMS = ("lhs_contracting", "lhs_batch")
VIEWS = ("bitcast", "get-tuple-element", "reshape")
UPDATES = {"dynamic-update-slice": 1, "scatter": 2}
"""Opcodes that write a part of their first operand in place, and the operand that is written there."""
HOST = "S(5)"
"""Mark of an array in the memory of the host."""
SLICES = ("dynamic-slice", "slice", "gather")


class Price(NamedTuple):
    """The cost of one execution of an instruction."""

    kind: Kind
    seconds: float
    flops: float = 0.0
    bytes: float = 0.0
    """Bytes of device memory that a kernel reads and writes, or bytes of a collective's whole tensors."""
    axes: tuple[str, ...] = ()
    """Mesh axes that a collective crosses."""
    unknown: str = ""
    """Name of an unknown instruction, which was priced by its bytes; empty if it is known."""

    @property
    def over(self) -> str:
        """Return the mesh axes joined by "+", or "" if it crosses none."""
        return "+".join(self.axes)


def price(line: Instruction, beside: Mapping[str, Instruction], program: Program, gpu: Gpu, mesh: AnyMesh) -> Price:
    """Return the price of an instruction; the start of an asynchronous operation has the price of all of it.

    Loops, branches and calls have no price of their own.

    Args:
        line: instruction to be priced.
        beside: instructions of the same computation, by name.
        program: program to which it belongs.
        gpu: type of GPU that runs it.
        mesh: mesh for which the program was compiled.
    """
    opcode = line.opcode.removesuffix("-start")
    if opcode in FREE or line.opcode.endswith(("-done", "-update")):
        return Price("free", 0.0)
    inside = list(_inside(line, beside, program))
    sends = [_collective(one, gpu, mesh) for one, _ in inside if one.opcode.removesuffix("-start") in OPS]
    if sends:
        axes = tuple(axis for axis in mesh.shape if any(axis in send.axes for send in sends))
        return Price("collective", sum(s.seconds for s in sends), 0.0, sum(s.bytes for s in sends), axes)
    size = _traffic(line, beside, program)
    stream = memory_seconds(gpu, size) + LAUNCH
    products = [product for one, names in inside for product in _product(one, names)]
    if products:
        seconds = sum(matmul_seconds(gpu, p.m, p.k, p.n, p.numbers) for p in products)
        return Price("matmul", max(seconds, stream), sum(2.0 * p.m * p.k * p.n for p in products), size)
    target = find(r'custom_call_target="([^"]*)"', line.attributes)
    if target.startswith("__cudnn$fmha"):
        flops = fmha_flops(line, target)
        return Price("attention", max(attention_seconds(gpu, flops), stream), flops, size)
    unknown = "" if opcode in STREAMED else target or opcode
    if HOST in line.type:
        unknown = "copy between GPU and host"
    return Price("memory", stream, 0.0, size, unknown=unknown)


class _Product(NamedTuple):
    m: float
    """Rows of the result, over all products of a batch."""
    k: float
    n: float
    numbers: Numbers


def _inside(
    line: Instruction, beside: Mapping[str, Instruction], program: Program
) -> Iterator[tuple[Instruction, Mapping[str, Instruction]]]:
    """Yield the instructions that a kernel computes, with those beside them: itself, or all in its fusion."""
    if line.opcode not in WRAPPERS:
        yield line, beside
        return
    for name in line.calls:
        for one in program.computations[name]:
            yield from _inside(one, program.named(name), program)


def _product(line: Instruction, names: Mapping[str, Instruction]) -> Iterator[_Product]:
    """Yield the matrix product of an instruction, if it is one."""
    if line.opcode == "dot":
        dims = {part: integers(find(rf"{part}_dims=\{{([\d,]*)\}}", line.attributes)) for part in DOT_DIMS}
    elif find('custom_call_target="(__cublas)', line.attributes):
        config = line.attributes.replace(" ", "")
        dims = {part: integers(find(rf'"{part}_dimensions":\[([^\]]*)\]', config)) for part in DOT_DIMS}
    else:
        return
    (lhs, dtype), (rhs, _) = (names[name].arrays[0] for name in line.operand_names[:2])
    k = prod(lhs[dim] for dim in dims["lhs_contracting"])
    batch = prod(lhs[dim] for dim in dims["lhs_batch"])
    yield _Product(prod(lhs) / k, k, prod(rhs) / k / batch, _numbers(dtype))


def _numbers(dtype: str) -> Numbers:
    return "fp8" if dtype.startswith("f8") else "half" if dtype in ("bf16", "f16") else "fp32"


def size_of(arrays: Sequence[tuple[Shape, str]]) -> float:
    """Return the bytes of arrays, given as shape and XLA's dtype."""
    return sum(prod(shape) * width(dtype) for shape, dtype in arrays)


def _traffic(line: Instruction, beside: Mapping[str, Instruction], program: Program) -> float:
    """Return the bytes that a kernel reads and writes."""
    if line.opcode in WRAPPERS:
        (called,) = line.calls[:1]
        return _of_computation(program.computations[called])
    opcode = line.opcode.removesuffix("-start")
    if opcode in SLICES:
        return 2 * size_of(line.results)
    if opcode in UPDATES:
        return 2 * size_of(beside[line.operand_names[UPDATES[opcode]]].arrays)
    read = sum(size_of(beside[name].arrays) for name in line.operand_names if name in beside)
    library = "__cublas" in line.attributes or "__cudnn" in line.attributes  # their last result is scratch
    return read + size_of(line.results[:-1] if library and len(line.results) > 1 else line.results)


def _of_computation(lines: Sequence[Instruction]) -> float:
    """Return the bytes that a fused computation reads from its parameters, and those that it writes of its results."""
    names = {line.name: line for line in lines}
    users: dict[str, list[Instruction]] = {line.name: [] for line in lines}
    for line in lines:
        for name in line.operand_names:
            users[name].append(line)

    def read(name: str) -> float:
        """Return the bytes that are read from an array: all of it once, or the slices that are taken."""
        total = 0.0
        for user in users[name]:
            first = user.operand_names[0] == name
            if user.opcode in VIEWS:
                total += read(user.name)
            elif user.opcode in SLICES and first:
                total += size_of(user.arrays)
            elif not (user.opcode in UPDATES and first):
                return size_of(names[name].arrays)
        return min(total, size_of(names[name].arrays))

    def written(name: str) -> float:
        """Return the bytes that are written of a result: all of it, or the slice that is updated in place."""
        line = names[name]
        if line.opcode == "tuple":
            return sum(written(part) for part in line.operand_names)
        if (
            line.opcode in VIEWS
            and line.operand_names[0] in names
            and names[line.operand_names[0]].opcode != "parameter"
        ):
            return written(line.operand_names[0])
        if line.opcode in UPDATES:
            return size_of(names[line.operand_names[UPDATES[line.opcode]]].arrays)
        return size_of(line.arrays)

    root = next(line.name for line in lines if line.root)
    return sum(read(line.name) for line in lines if line.opcode == "parameter") + written(root)


def _collective(line: Instruction, gpu: Gpu, mesh: AnyMesh) -> Price:
    """Return the price of a collective, from the bytes of its whole tensors and the nodes of its devices."""
    op = line.opcode.removesuffix("-start")
    what = exchange(line, op, mesh)
    size = sum(prod(shape) * width(dtype) for shape, dtype in what.tensors)
    members = what.groups.shape[1]
    if op == "collective-permute":
        nodes = what.groups // gpu.link_domain
        seconds = send_seconds(gpu, size, 2, 1 if (nodes[:, 0] == nodes[:, 1]).all() else gpu.link_domain)
    else:  # of an all-to-all a device sends all pieces but its own: as much as a reduce-scatter of the same array
        stride = int(np.diff(np.sort(what.groups[0])).min(initial=what.groups.size))
        seconds = gather_seconds(gpu, size, members, stride) * (2 if op == "all-reduce" else 1)
    return Price("collective", seconds, 0.0, size, what.axes)
