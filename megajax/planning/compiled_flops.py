"""FLOPs of matrix products that a compiled program executes on a device, read from its HLO text.

    executed = executed_flops(step.lower(state, batch).compile())

A multiply-add is 2 FLOPs; nothing else counts, nor what XLA turned into something else than a product (a vector times a
matrix). A fused attention kernel counts as what it computes: two products of scores forward, five backward
(2205.14135), of half of the scores under a causal mask. Masked slots of a pipeline run like others, and count.
"""

from __future__ import annotations

import re
from fractions import Fraction
from math import prod

import jax

from megajax.planning.hlo import UNKNOWN, Executed, executed, find, integers

ATTENTION_PRODUCTS = {"__cudnn$fmhaSoftmax": 2, "__cudnn$fmhaSoftmaxBackward": 5}
"""By the kernel's name, without what it names of bias and dropout."""


def executed_flops(
    program: jax.stages.Compiled | str, unknown: int | None = None, taken: Fraction = Fraction(1)
) -> int:
    """FLOPs of matrix products of one run on one device.

    Args:
        program: `jax.jit(f).lower(...).compile()`, or its `as_text()`.
        unknown: iterations to assume of every loop whose number depends on data; None = there must be none.
        taken: how often branches that multiply are taken, of the times that the program comes to them.

    Raises:
        ValueError: matrix products in such a loop, or a kernel whose FLOPs are not known.
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
    """Of one execution."""
    attributes = line.instruction.attributes
    if line.instruction.opcode == "dot":
        return _product(line, integers(find(r"lhs_contracting_dims=\{([\d,]*)\}", attributes)))
    target = find(r'custom_call_target="([^"]*)"', attributes)
    if target.startswith("__cublas$"):
        return _product(line, integers(find(r'"lhs_contracting_dimensions":\[([^\]]*)\]', attributes.replace(" ", ""))))
    if target.startswith("__cudnn$fmha"):
        return _attention(line, re.sub("ScaleBias|ScaleMask|Dropout|Bias", "", target))
    if re.search("gemm|matmul|conv", target):
        raise ValueError(f"kernel {target!r} multiplies nobody knows how much: add it to {__name__}")
    return 0


def _product(line: Executed, contracted: tuple[int, ...]) -> int:
    """2 m n k, times the batch."""
    ((lhs, _),) = line.operands[0]
    result, _ = line.instruction.arrays[0]
    return 2 * prod(result) * prod(lhs[dim] for dim in contracted)


def _attention(line: Executed, target: str) -> int:
    """Scores [B, N, S, S] of heads of H numbers, which the last dim of the first operand is."""
    attributes = line.instruction.attributes.replace(" ", "")
    scores = integers(find(r'"intermediate_tensor_shape":\{.*?"dimensions":\[([^\]]*)\]', attributes))
    head = integers(find(r"operand_layout_constraints=\{\w+\[([\d,]*)\]", attributes))[-1]
    causal = find(r'"mask_type":"(\w+)"', attributes).endswith("CAUSAL")
    return ATTENTION_PRODUCTS[target] * 2 * prod(scores) * head // (2 if causal else 1)
