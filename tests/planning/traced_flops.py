"""FLOPs of a traced program, counted to check those that `flops.count_flops` derives.

    executed = matmul_flops(jax.make_jaxpr(train_step)(state, batch))  # shapes are enough, nothing runs

Only matrix products count, a multiply-add as 2 FLOPs. Equations on which no result depends do not count, because the
compiler removes them: among them are the forward passes that a pipeline traces again only for their backward passes,
and the last matrix of a layer that is recomputed. Kernels that are not written in JAX (cuDNN attention) cannot be
traced: use the xla kernel.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Var

Needed = list[bool]
"""For every input, or output: whether a result depends on it."""
CALLS = ("jit", "closed_call", "checkpoint", "remat2", "custom_jvp_call", "custom_vjp_call")
"""Primitives that run the one jaxpr among their parameters once, on their own inputs."""


def matmul_flops(program: ClosedJaxpr) -> int:
    """FLOPs of one run, on all devices together; what the compiler itself repeats on several devices counts once.

    A branch counts as its dearest side, taken every time.

    Raises:
        ValueError: matrix products in a loop whose number of iterations depends on data, or in an unknown primitive.
    """
    return _count(program.jaxpr, _all(program.jaxpr.outvars))[0]


def _count(jaxpr: Jaxpr, outputs: Needed) -> tuple[int, Needed]:
    """FLOPs that the needed outputs take, and the inputs that they need."""
    needed = {var for var, use in zip(jaxpr.outvars, outputs, strict=True) if use and isinstance(var, Var)}
    total = 0
    for equation in reversed(jaxpr.eqns):
        wanted = [var in needed for var in equation.outvars]
        if any(wanted):
            flops, inputs = _count_equation(equation, wanted)
            total += flops
            needed |= {var for var, use in zip(equation.invars, inputs, strict=True) if use and isinstance(var, Var)}
    return total, [var in needed for var in jaxpr.invars]


def _count_equation(equation: JaxprEqn, outputs: Needed) -> tuple[int, Needed]:
    params, everything = equation.params, _all(equation.invars)
    match equation.primitive.name:
        case "dot_general":
            return _dot_general(equation), everything
        case "scan":
            return _scan(equation, outputs)
        case "cond":
            sides = [_count(side, outputs) for side in _jaxprs(params)]
            inputs = [any(uses) for uses in zip(*(uses for _, uses in sides), strict=True)]
            return max(flops for flops, _ in sides), [True, *inputs]
        case "shard_map":
            flops, inputs = _count(params["jaxpr"], outputs)
            return flops * prod(params["mesh"].shape[axis] for axis in params["newly_manual_axes"]), inputs
        case name if name in CALLS:
            (body,) = _jaxprs(params)
            return _count(body, outputs)
        case name:
            if any(_count(body, _all(body.outvars))[0] for body in _jaxprs(params)):
                raise ValueError(f"matrix products inside {name!r}, which runs them an unknown number of times")
            return 0, everything


def _dot_general(equation: JaxprEqn) -> int:
    """2 m n k, times the batch: every number of the result sums over the contracted dims."""
    (contracted, _), _ = equation.params["dimension_numbers"]
    return 2 * prod(_shape(equation.outvars[0])) * prod(_shape(equation.invars[0])[dim] for dim in contracted)


def _scan(equation: JaxprEqn, outputs: Needed) -> tuple[int, Needed]:
    """Inputs of the body are constants, what is carried, slices; outputs are what is carried, slices."""
    (body,) = _jaxprs(equation.params)
    slices = [_shape(whole) != _shape(part) for whole, part in zip(equation.invars, body.invars, strict=True)]
    carried = sum(_shape(whole) == _shape(part) for whole, part in zip(equation.outvars, body.outvars, strict=True))
    first = len(slices) - sum(slices) - carried
    while True:
        flops, inputs = _count(body, outputs)
        # What an iteration needs from the one before it, that one must compute.
        carry = [a or b for a, b in zip(outputs[:carried], inputs[first : first + carried], strict=True)]
        if carry == outputs[:carried]:
            return equation.params["length"] * flops, inputs
        outputs = carry + outputs[carried:]


def _jaxprs(params: dict[str, Any]) -> list[Jaxpr]:
    """Those among the parameters, alone or in a tuple."""
    values = [value for group in params.values() for value in (group if isinstance(group, tuple) else (group,))]
    jaxprs = [value for value in values if isinstance(value, Jaxpr | ClosedJaxpr)]
    return [value.jaxpr if isinstance(value, ClosedJaxpr) else value for value in jaxprs]


def _shape(variable: Any) -> tuple[int, ...]:
    return variable.aval.shape


def _all(variables: Sequence[Any]) -> Needed:
    return [True] * len(variables)
