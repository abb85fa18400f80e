"""The virtual profile of a training step: the parts of its time and memory, read from XLA's program.

    profile = Profile.of(compiled.as_text(), gpu_named("H100"), mesh)
    print(profile)
    profile.seconds, profile.exposed["tensor"], profile.peak

Nothing is run. Prices are those of `planning.profile.prices`; the order and the overlap follow XLA's schedule.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from fractions import Fraction
from functools import cache, cached_property
from typing import Any

from megajax.costs.hardware import Gpu
from megajax.costs.memory import GIB
from megajax.planning.collectives import PLACES, AnyMesh, Place, place_of
from megajax.planning.hlo import Instruction, Program
from megajax.planning.plan import columns
from megajax.planning.profile.memory import Memory, Moment
from megajax.planning.profile.prices import Price, price
from megajax.planning.profile.timeline import COPIES, Span, Timeline, play

DEAREST = 20
"""Number of instructions, and of source lines, that are listed."""
SLOWED = "slowed"
"""Name of the time that kernels lose because collectives run beside them."""


@dataclass(frozen=True)
class Profile:
    """The times and the memory of one run of a program on one device."""

    program: Program
    gpu: Gpu
    timeline: Timeline

    @classmethod
    def of(
        cls,
        text: str,
        gpu: Gpu,
        mesh: AnyMesh,
        taken: Callable[[str], Fraction] = lambda source: Fraction(1),
        unknown: int | None = None,
    ) -> Profile:
        """Profile a scheduled program.

        Args:
            text: `jax.jit(f).lower(...).compile().as_text()`.
            gpu: type of GPU that runs it.
            mesh: mesh for which it was compiled.
            taken: function from a source to the share of times that the dearest branch there is taken.
            unknown: turns to assume for loops whose number depends on data; None = such loops are named, and count
                once.
        """
        program = Program.of(text)

        @cache
        def priced(line: Instruction, computation: str) -> Price:
            return price(line, program.named(computation), program, gpu, mesh)

        return cls(program, gpu, play(program, priced, taken, unknown))

    @property
    def seconds(self) -> float:
        """Return the seconds of a step."""
        return self.timeline.seconds

    @cached_property
    def parts(self) -> Mapping[str, float]:
        """Return the seconds of the computing queue by the work that it does or waits for; their sum is the step.

        Keys are "matmul", "attention", "memory" (kernels whose time follows from their bytes), SLOWED, and mesh axes
        for exposed communication, joined by "+" if a collective crosses several.
        """
        parts: defaultdict[str, float] = defaultdict(float)
        for span in self.timeline.spans:
            if span.computes:
                parts[span.price.kind] += span.times * span.price.seconds
                parts[SLOWED] += span.times * (span.seconds - span.price.seconds)
            else:
                parts[span.price.over or "memory"] += span.times * span.waited
        return dict(parts)

    @cached_property
    def transfers(self) -> Mapping[str, tuple[float, float]]:
        """Return the hidden and the exposed seconds of collectives by mesh axes, joined by "+"."""
        hidden: defaultdict[str, float] = defaultdict(float)
        exposed: defaultdict[str, float] = defaultdict(float)
        for span in self._collectives:
            hidden[span.price.over] += span.times * (span.seconds - span.waited)
            exposed[span.price.over] += span.times * span.waited
        return {axes: (hidden[axes], exposed[axes]) for axes in exposed}

    @property
    def _collectives(self) -> Iterable[Span]:
        return (span for span in self.timeline.spans if span.price.kind == "collective")

    @cached_property
    def places(self) -> Mapping[Place, float]:
        """Return the seconds of the computing queue by the loop of a training step."""
        places: defaultdict[Place, float] = defaultdict(float)
        for span in self.timeline.spans:
            places[place_of(span.source)] += span.times * span.taken
        return {place: places[place] for place in PLACES}

    @cached_property
    def lines(self) -> Mapping[str, float]:
        """Return the seconds of the computing queue by Python line ("megajax/models/layers.py:30"), dearest first."""
        lines: defaultdict[str, float] = defaultdict(float)
        for span in self.timeline.spans:
            lines[_short(self.program.source_line(span.instruction)) or "made by XLA"] += span.times * span.taken
        return dict(sorted(lines.items(), key=lambda line: -line[1]))

    @property
    def dearest(self) -> list[Span]:
        """Return the instructions that keep the computing queue longest, dearest first."""
        return sorted(self.timeline.spans, key=lambda span: -span.times * span.taken)[:DEAREST]

    @cached_property
    def memory(self) -> Memory:
        """Return the temporary memory over time."""
        return Memory(self.program)

    @property
    def peak(self) -> Moment:
        """Return the moment at which most temporary memory is held."""
        return self.memory.peak

    def as_dict(self) -> dict[str, Any]:
        """Return a dictionary with the keys that `planning.schema.SCHEMA` documents."""
        return {
            "seconds": self.seconds,
            "parts": dict(self.parts),
            "transfers": {axes: {"hidden": a, "exposed": b} for axes, (a, b) in self.transfers.items()},
            "places": dict(self.places),
            "lines": dict(list(self.lines.items())[:DEAREST]),
            "peak_bytes": self.peak.bytes,
            "uncounted": dict(self.timeline.uncounted),
        }

    def __str__(self) -> str:
        """Return tables: parts, transfers, places, dearest instructions and lines, and the peak of memory."""
        where = self._parts(), self._transfers(), self._places()
        return "\n\n".join((*where, self._dearest(), self._lines(), self._peak()))

    def _parts(self) -> str:
        rows = [("virtual profile", f"{self.seconds:.3f} s", "")]
        for name, seconds in sorted(self.parts.items(), key=lambda part: -part[1]):
            rows.append((f"  {part_name(name)}", f"{seconds:.3f} s", f"{seconds / self.seconds:.1%}"))
        lines = [columns(rows)]
        if self.timeline.uncounted:
            names = ", ".join(f"{name} ({count})" for name, count in self.timeline.uncounted.items())
            lines.append(f"not understood, priced by bytes or counted once: {names}")
        return "\n".join(lines)

    def _transfers(self) -> str:
        rows = [("collectives over", "seconds", "hidden", "exposed", "")]
        for axes, (hidden, exposed) in self.transfers.items():
            whole = hidden + exposed
            rows.append(
                (f"  {axes}", f"{whole:.3f}", f"{hidden:.3f}", f"{exposed:.3f}", f"{hidden / whole:.0%} hidden")
            )
        return columns(rows) if len(rows) > 1 else "a single GPU sends nothing"

    def _places(self) -> str:
        return columns([("in the loop", "seconds"), *((f"  {name}", f"{s:.3f}") for name, s in self.places.items())])

    def _dearest(self) -> str:
        rows = [("dearest instructions", "seconds", "times", "ms each", "rate", "", "")]
        for span in self.dearest:
            each = span.price.flops or span.price.bytes
            unit = "TFLOP/s" if span.price.flops else "GB/s"
            rate = each / span.price.seconds / (1e12 if span.price.flops else 1e9)
            times = f"{span.times:,.0f}"
            name = f"  {span.instruction.name}"
            line = _short(self.program.source_line(span.instruction))
            cells = (f"{span.times * span.taken:.4f}", times, f"{1e3 * span.seconds:.3f}", f"{rate:,.0f} {unit}")
            rows.append((name, *cells, _role(span), line))
        return columns(rows, left=(0, 5, 6))

    def _lines(self) -> str:
        rows = list(self.lines.items())[:DEAREST]
        return columns([("lines of Python", "seconds"), *((f"  {line}", f"{seconds:.4f}") for line, seconds in rows)])

    def _peak(self) -> str:
        peak, rows = self.peak, [("held at the peak", "GiB", "", "")]
        for held in peak.held[:DEAREST]:
            line = _short(self.program.source_line(held.instruction))
            shapes = re.sub(r"\{[^}]*\}", "", held.instruction.type)
            rows.append((f"  {held.instruction.name}", f"{held.bytes / GIB:.3f}", shapes[:60], line))
        where = f"{peak.bytes / GIB:.2f} GiB of temporary memory at most, at {peak.instruction.name}"
        return f"{where}\n{columns(rows, left=(0, 2, 3))}"


PARTS = {
    "matmul": "matrix products",
    "attention": "attention",
    "memory": "memory traffic",
    SLOWED: "slowed by collectives beside",
}
"""Parts of a profile that are not mesh axes, in words."""


def part_name(part: str) -> str:
    """Return a key of `Profile.parts` in words."""
    return PARTS.get(part, f"waiting for {part}")


def _role(span: Span) -> str:
    return span.price.over or (span.queue if span.queue == COPIES else span.price.kind)


def _short(line: str) -> str:
    """Return a source line without the folders above the package."""
    return re.sub(r".*/(?=megajax/)", "", line)
