"""Trace of a timeline for Perfetto (ui.perfetto.dev) or chrome://tracing, as JSON in the Trace Event Format.

Every queue of the GPU is a row. The first turn of a loop is drawn instruction by instruction, and all later turns as
one block with their number. A counter shows the temporary memory.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from megajax.files import write_text
from megajax.planning.profile.profile import Profile
from megajax.planning.profile.timeline import COLLECTIVES, COMPUTING, COPIES, NEIGHBOURS

ROWS = (COMPUTING, COLLECTIVES, NEIGHBOURS, COPIES)
"""Queues in the order in which they are drawn."""
MICROSECOND = 1e-6


def write_trace(profile: Profile, path: Path) -> None:
    """Write the trace of a profile.

    Raises:
        InputError: the file cannot be written.
    """
    write_text(path, json.dumps({"displayTimeUnit": "ms", "traceEvents": trace_events(profile)}) + "\n")


def trace_events(profile: Profile) -> list[dict[str, Any]]:
    """Return the events of a profile, in microseconds."""
    events: list[dict[str, Any]] = [
        {"ph": "M", "name": "thread_name", "pid": 0, "tid": row, "args": {"name": name}}
        for row, name in enumerate(ROWS)
    ]
    for span in profile.timeline.spans:
        details = {
            "kind": span.price.kind,
            "over": span.price.over,
            "times": span.times,
            "FLOPs": span.price.flops,
            "bytes": span.price.bytes,
            "alone, ms": 1e3 * span.price.seconds,
            "waited for, ms": 1e3 * span.waited,
            "line": profile.program.source_line(span.instruction),
            "source": span.source,
        }
        events.append(_slice(span.instruction.name, ROWS.index(span.queue), span.start, span.seconds, details))
    for loop in profile.timeline.loops:
        name = f"{loop.times} more turns of {loop.name}"
        events.append(_slice(name, 0, loop.start, loop.turn * loop.times, {"one turn, ms": 1e3 * loop.turn}))
    starts = {span.instruction.name: span.start for span in profile.timeline.spans}
    for line, held in profile.memory.moments():
        if line.name in starts:
            time = starts[line.name] / MICROSECOND
            events.append({"ph": "C", "name": "temporary bytes", "pid": 0, "ts": time, "args": {"bytes": held}})
    return events


def _slice(name: str, row: int, start: float, seconds: float, details: dict[str, Any]) -> dict[str, Any]:
    """Return one block in a row of the trace."""
    time = {"ts": start / MICROSECOND, "dur": seconds / MICROSECOND}
    return {"ph": "X", "name": name, "pid": 0, "tid": row, "args": details} | time
