"""Comparison of a plan with its compiled program: memory by class, collectives by axis, and FLOPs.

The program is the real training step, compiled in `megajax.planning.deviceless`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from megajax.costs.device import Device
from megajax.costs.memory import GIB
from megajax.planning.collectives import PLACES, Place
from megajax.planning.plan import Plan, columns
from megajax.planning.profile.profile import Profile

SIMULATED = "simulated CPU"
"""Name of the target if no compiler for GPUs is installed."""
TOLERANCE = 0.05
"""Relative difference of traffic and FLOPs above which program and closed form contradict each other: one is wrong."""
TINY = 2**18
"""Bytes over an axis in a loop of a step below which differences are ignored (vectors, counts and sums of losses)."""


@dataclass(frozen=True)
class Sends:
    """The collectives of one kind in a step, in which every device takes part."""

    op: str
    """Kind of collective, one of `planning.collectives.OPS`."""
    axes: tuple[str, ...]
    """Mesh axes that the collectives cross."""
    loop: tuple[int, ...]
    """Iterations of the loops around them, outermost first; empty = once a step."""
    place: Place
    """Place of these loops in a training step."""
    conditional: bool
    """Whether they are in a branch, so that `count` and `bytes` are upper bounds."""
    count: int
    bytes: int
    """Bytes of the whole tensors over all executions."""
    largest: int
    """Bytes of the largest of these tensors."""
    taken: float
    """Bytes that are really sent, as often as branches are taken."""


@dataclass(frozen=True)
class CompiledPlan:
    """A plan with the buffer assignment and the collectives that XLA has made for its step."""

    plan: Plan
    target: str
    """Device that the step was compiled for: a GPU's `device_kind`, or SIMULATED."""
    memory: dict[str, int]
    """Bytes of a device: "arguments" (state and batch), "outputs" in memory of their own, "temporary", "code"."""
    sends: tuple[Sends, ...]
    flops: int | None
    """FLOPs of matrix products on a device in a step, if experts are used alike; None = not counted on simulated
    devices.
    """
    unused: tuple[str, ...]
    """Inputs of the step on which no result depends."""
    seconds: float
    """Seconds that tracing, lowering and compiling took."""
    host_bytes: int
    """Largest host memory that the compiling process had."""
    profile: Profile | None
    """Times and memory of the program; None on simulated devices, whose program no GPU runs."""

    @property
    def need(self) -> int:
        """Return the bytes that a device needs, without memory that arrays cannot use."""
        return sum(self.memory.values())

    @property
    def verdict(self) -> str:
        """Return a text that tells whether the step fits."""
        fits = "" if self.target == SIMULATED else "fits: " if self.fits else "does not fit: "
        return f"{fits}XLA plans {self.need / GIB:.1f} GiB, arrays can have {self.plan.limit / GIB:.1f} GiB"

    @property
    def fits(self) -> bool:
        """Tell whether a device has enough memory; for simulated devices, by the closed form."""
        return self.plan.fits if self.target == SIMULATED else self.need <= self.plan.limit

    @property
    def bytes_by_axis(self) -> dict[str, int]:
        """Return the bytes over every axis of the plan, alone or together with others."""
        return {axis: sum(s.bytes for s in self.sends if axis in s.axes) for axis in self.plan.communication}

    @property
    def comparison(self) -> Mapping[str, tuple[float, float]]:
        """Return pairs of closed form and XLA's value, by line.

        The lines are bytes of "state" and "temporary" memory, bytes "over" axes by loop, and FLOPs of "products". In a
        step of a single microbatch, the loop of the microbatch and the step count as one place.
        """
        memory = self.plan.stages[self.plan.fullest]
        pairs: dict[str, tuple[float, float]] = {
            "state": (memory.persistent, self.memory["arguments"]),
            "temporary": (memory.temporary, self.memory["temporary"]),
        }
        together: dict[Place, tuple[Place, ...]] = {place: (place,) for place in PLACES}
        if self.plan.mesh["pipe"] == 1 and Device.of(self.plan.config).microbatches == 1:
            del together["each microbatch"]
            together["each step"] = ("each microbatch", "each step")
        for axis, closed in self.plan.communication.items():
            for name, places in together.items():
                planned = sum(closed.places[place] for place in places)
                xla = sum(s.taken for s in self.sends if axis in s.axes and s.place in places)
                if max(planned, xla) > TINY:
                    pairs[f"over {axis}, {name}"] = (planned, xla)
        return pairs if self.flops is None else pairs | {"products": (self.plan.time.compiled_flops, self.flops)}

    def deviation(self, name: str) -> float:
        """Return the relative deviation of a line of the comparison from the closed form."""
        closed, xla = self.comparison[name]
        return xla / closed - 1 if closed else math.inf if xla else 0.0

    def is_planned(self, name: str) -> bool:
        """Tell whether the closed form covers a line; it may lack an optimizer's own products and traffic."""
        return not self.plan.uncounted or not name.endswith(("each step", "products"))

    def differs(self, name: str, tolerance: float) -> bool:
        """Tell whether a line of traffic or FLOPs deviates from the closed form by more than the share `tolerance`."""
        closed, xla = self.comparison[name]
        return abs(xla - closed) > max(tolerance * closed, TINY)

    @property
    def differences(self) -> tuple[str, ...]:
        """Return texts on the amounts that XLA's program sends or multiplies otherwise than the closed form.

        Simulated devices are not judged, because their compiler uses other collectives.
        """
        if self.target == SIMULATED:
            return ()
        return tuple(
            f"{name} {_amount(name, xla)} instead of {_amount(name, closed)}"
            for name, (closed, xla) in self.comparison.items()
            if name.startswith(("over", "products")) and self.is_planned(name) and self.differs(name, TOLERANCE)
        )

    def as_dict(self) -> dict[str, Any]:
        """Return a dictionary with the keys that `planning.schema.SCHEMA` documents."""
        return {
            "target": self.target,
            "seconds": self.seconds,
            "host_bytes": self.host_bytes,
            "memory": self.memory,
            "bytes_by_axis": self.bytes_by_axis,
            "flops": self.flops,
            "unused": list(self.unused),
            "differences": list(self.differences),
            "profile": self.profile and self.profile.as_dict(),
            "collectives": [vars(s) | {"axes": list(s.axes), "loop": list(s.loop)} for s in self.sends],
        }

    def __str__(self) -> str:
        """Return tables: closed form against XLA, then every kind of collective."""
        head = f"compiled for {self.plan.gpus:,} x {self.target} in {self.seconds:.1f} s"
        if self.target == SIMULATED:
            head += " (no CUDA plugin: another compiler, without GPU kernels: memory and collectives are not judged)"
        head += f", {self.host_bytes / GIB:.1f} GiB of host memory"
        unused = f"not used by the step: {', '.join(self.unused)}" if self.unused else "every input is used"
        tables = (self._comparison(), unused, "", self._collectives())
        profile = ("", str(self.profile)) if self.profile else ()
        return "\n".join((head, self.verdict, *tables, *profile))

    def _comparison(self) -> str:
        rows = [("a device", "closed form", "XLA", "difference")]
        for name, (closed, xla) in self.comparison.items():
            difference = "-" if not xla else f"{closed / xla - 1:+.1%}" if self.is_planned(name) else "not planned"
            rows.append((f"  {name}", _amount(name, closed), _amount(name, xla), difference))
        return columns(rows)

    def _collectives(self) -> str:
        rows = [("collective", "axes", "count", "GiB a step", "in loops of", "")]
        for sends in sorted(self.sends, key=lambda sends: -sends.bytes):
            loops, most = " x ".join(map(str, sends.loop)) or "-", "<=" if sends.conditional else ""
            size = f"{sends.bytes / GIB:,.3f}"
            rows.append((sends.op, " ".join(sends.axes), f"{most}{sends.count:,}", size, loops, sends.place))
        return columns(rows, left=(0, 5))


def _amount(name: str, number: float) -> str:
    """Return the number in a line of the comparison with its unit."""
    if name == "products":
        return f"{number / 1e12:,.3f} TFLOP"
    return f"{number / GIB:,.2f} GiB" if number >= GIB / 10 else f"{number / 2**20:,.2f} MiB"
