"""What the compiler says about a plan: memory by class and collectives by axis, next to the closed form.

The program is the real training step, compiled in `megajax.training.deviceless_step`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from megajax.planning.memory import GIB
from megajax.planning.plan import Plan, columns

SIMULATED = "simulated CPU"
"""Target if there is no compiler for GPUs."""


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


@dataclass(frozen=True)
class CompiledPlan:
    """XLA's buffer assignment and collectives of a plan's step."""

    plan: Plan
    target: str
    """What it was compiled for: a GPU's `device_kind`, or SIMULATED."""
    memory: dict[str, int]
    """Bytes of a device: "arguments" (state and batch), "outputs" other than these, "temporary", "code"."""
    sends: tuple[Sends, ...]
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

    def as_dict(self) -> dict[str, Any]:
        """By the keys that `planning.schema.SCHEMA` documents."""
        return {
            "target": self.target,
            "seconds": self.seconds,
            "host_bytes": self.host_bytes,
            "memory": self.memory,
            "bytes_by_axis": self.bytes_by_axis,
            "collectives": [vars(s) | {"axes": list(s.axes), "loop": list(s.loop)} for s in self.sends],
        }

    def __str__(self) -> str:
        """Tables: closed form against XLA, then every kind of collective."""
        head = f"compiled for {self.plan.gpus:,} x {self.target} in {self.seconds:.1f} s"
        if self.target == SIMULATED:
            head += " (no CUDA plugin: another compiler, without GPU kernels, and so other memory and collectives)"
        head += f", {self.host_bytes / GIB:.1f} GiB of host memory"
        return "\n".join((head, self.verdict, self._comparison(), "", self._collectives()))

    def _comparison(self) -> str:
        memory, sent = self.plan.stages[self.plan.fullest], self.bytes_by_axis
        branches = {axis for sends in self.sends if sends.conditional for axis in sends.axes}
        pairs = {
            "state": (memory.persistent, self.memory["arguments"]),
            "temporary": (memory.temporary, self.memory["temporary"]),
            **{f"over {axis}": (self.plan.communication[axis].bytes, sent[axis]) for axis in sent},
        }
        rows = [("GiB", "closed form", "XLA", "difference")]
        for name, (closed, xla) in pairs.items():
            most = "<=" if name.removeprefix("over ") in branches else ""
            difference = f"{closed / xla - 1:+.1%}" if xla else "-"
            rows.append((f"  {name}", f"{closed / GIB:,.2f}", f"{most}{xla / GIB:,.2f}", difference))
        return columns(rows)

    def _collectives(self) -> str:
        rows = [("collective", "axes", "count", "GiB a step", "in loops of")]
        for sends in sorted(self.sends, key=lambda sends: -sends.bytes):
            loops, most = " x ".join(map(str, sends.loop)) or "-", "<=" if sends.conditional else ""
            size = f"{sends.bytes / GIB:,.3f}"
            rows.append((sends.op, " ".join(sends.axes), f"{most}{sends.count:,}", size, loops))
        return columns(rows)
