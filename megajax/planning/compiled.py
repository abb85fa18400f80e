"""What the compiler says about a plan: memory by class, collectives by axis, FLOPs, next to the closed form.

The program is the real training step, compiled in `megajax.planning.deviceless_step`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from megajax.costs.memory import GIB
from megajax.parallel.pipeline.schedule import Interleaved1F1B
from megajax.planning.layouts import microbatches
from megajax.planning.plan import Plan, columns

SIMULATED = "simulated CPU"
"""Target if there is no compiler for GPUs."""
TOLERANCE = 0.05
"""Relative difference of traffic and FLOPs above which program and closed form contradict each other: one is wrong."""


@dataclass(frozen=True)
class Sends:
    """Collectives of one kind in a step, as every device takes part in them."""

    op: str
    """Of `planning.collectives.OPS`."""
    axes: tuple[str, ...]
    """Mesh axes that they cross."""
    loop: tuple[int, ...]
    """Iterations of the loops around them, outermost first; none = once a step."""
    conditional: bool
    """In a branch: `count` and `bytes` are upper bounds."""
    count: int
    bytes: int
    """Of whole tensors, all executions together."""
    largest: int
    """Bytes of the largest of these tensors."""


@dataclass(frozen=True)
class CompiledPlan:
    """XLA's buffer assignment and collectives of a plan's step."""

    plan: Plan
    target: str
    """What it was compiled for: a GPU's `device_kind`, or SIMULATED."""
    memory: dict[str, int]
    """Bytes of a device: "arguments" (state and batch), "outputs" other than these, "temporary", "code"."""
    sends: tuple[Sends, ...]
    flops: int | None
    """Of matrix products on a device in a step, if experts are used alike; None = not counted on simulated devices."""
    unused: tuple[str, ...]
    """Inputs of the step that no result depends on."""
    seconds: float
    """To trace, lower and compile."""
    host_bytes: int
    """Most host memory that the compiling process had."""

    @property
    def need(self) -> int:
        """Bytes of a device, without what no array can have."""
        return sum(self.memory.values())

    @property
    def verdict(self) -> str:
        """Whether it fits, in words."""
        fits = "" if self.target == SIMULATED else "fits: " if self.fits else "does not fit: "
        return f"{fits}XLA plans {self.need / GIB:.1f} GiB, arrays can have {self.plan.limit / GIB:.1f} GiB"

    @property
    def fits(self) -> bool:
        """Whether a device has enough memory; of simulated ones, whether the closed form says so."""
        return self.plan.fits if self.target == SIMULATED else self.need <= self.plan.limit

    @property
    def bytes_by_axis(self) -> dict[str, int]:
        """Bytes over every axis of the plan, alone or together with others."""
        return {axis: sum(s.bytes for s in self.sends if axis in s.axes) for axis in self.plan.communication}

    @property
    def comparison(self) -> Mapping[str, tuple[float, float]]:
        """Closed form and XLA: bytes of "state" and "temporary" memory and "over" every axis, FLOPs of "products"."""
        memory, sent = self.plan.stages[self.plan.fullest], self.bytes_by_axis
        pairs = {
            "state": (memory.persistent, self.memory["arguments"]),
            "temporary": (memory.temporary, self.memory["temporary"]),
            **{f"over {axis}": (self.plan.communication[axis].bytes, sent[axis]) for axis in sent},
        }
        return pairs if self.flops is None else pairs | {"products": (self.plan.time.compiled_flops, self.flops)}

    def deviation(self, name: str) -> float:
        """How far a line of the comparison is from the closed form, relative to that."""
        closed, most = self.comparison[name]
        axis = name.removeprefix("over ")
        branches = [s for s in self.sends if s.conditional and axis in s.axes]
        without = most - sum(s.bytes for s in branches)
        least, most = (without + size for size in self._taken(branches))
        nearest = min(max(closed, least), most)
        return nearest / closed - 1 if closed else math.inf if nearest else 0.0

    def _taken(self, branches: list[Sends]) -> tuple[float, float]:
        """Bytes that collectives in branches really send, at least and at most.

        A pipeline's branches are for what begins or ends with a microbatch (embedding, head, the embedding's gradient),
        so each is taken as often as there are microbatches. The code of each is in the loop over the steady ticks, and
        may be in that of warm-up or cool-down again. Where loops cannot be told apart, nobody knows.
        """
        if not branches:
            return 0, 0
        parallel, count = self.plan.config.parallel, microbatches(self.plan.config)
        schedule = Interleaved1F1B(self.plan.mesh["pipe"], parallel.chunks, count)
        steady = schedule.steady_ticks
        if steady in (1, schedule.warmup_ticks):
            return 0, sum(s.bytes for s in branches)
        exact = sum(s.bytes for s in branches if s.loop[:1] == (steady,)) * count / steady
        return exact, exact

    @property
    def differences(self) -> tuple[str, ...]:
        """Where XLA's program sends or multiplies what the closed form says it does not, in words.

        Simulated devices have another compiler, which sends other things: they are not judged.
        """
        if self.target == SIMULATED:
            return ()
        return tuple(
            f"{name} {_amount(name, xla)} instead of {_amount(name, closed)}"
            for name, (closed, xla) in self.comparison.items()
            if name.startswith(("over", "products")) and abs(self.deviation(name)) > TOLERANCE
        )

    def as_dict(self) -> dict[str, Any]:
        """By the keys that `planning.schema.SCHEMA` documents."""
        return {
            "target": self.target,
            "seconds": self.seconds,
            "host_bytes": self.host_bytes,
            "memory": self.memory,
            "bytes_by_axis": self.bytes_by_axis,
            "flops": self.flops,
            "unused": list(self.unused),
            "differences": list(self.differences),
            "collectives": [vars(s) | {"axes": list(s.axes), "loop": list(s.loop)} for s in self.sends],
        }

    def __str__(self) -> str:
        """Tables: closed form against XLA, then every kind of collective."""
        head = f"compiled for {self.plan.gpus:,} x {self.target} in {self.seconds:.1f} s"
        if self.target == SIMULATED:
            head += " (no CUDA plugin: another compiler, without GPU kernels: memory and collectives are not judged)"
        head += f", {self.host_bytes / GIB:.1f} GiB of host memory"
        unused = f"not used by the step: {', '.join(self.unused)}" if self.unused else "every input is used"
        return "\n".join((head, self.verdict, self._comparison(), unused, "", self._collectives()))

    def _comparison(self) -> str:
        rows = [("a device", "closed form", "XLA", "difference")]
        branches = {f"over {axis}" for sends in self.sends if sends.conditional for axis in sends.axes}
        for name, (closed, xla) in self.comparison.items():
            most = "<=" if name in branches else ""
            difference = f"{closed / xla - 1:+.1%}" if xla else "-"
            rows.append((f"  {name}", _amount(name, closed), most + _amount(name, xla), difference))
        return columns(rows)

    def _collectives(self) -> str:
        rows = [("collective", "axes", "count", "GiB a step", "in loops of")]
        for sends in sorted(self.sends, key=lambda sends: -sends.bytes):
            loops, most = " x ".join(map(str, sends.loop)) or "-", "<=" if sends.conditional else ""
            size = f"{sends.bytes / GIB:,.3f}"
            rows.append((sends.op, " ".join(sends.axes), f"{most}{sends.count:,}", size, loops))
        return columns(rows)


def _amount(name: str, number: float) -> str:
    """What a line of the comparison says, with its unit."""
    return f"{number / 1e12:,.3f} TFLOP" if name == "products" else f"{number / GIB:,.2f} GiB"
