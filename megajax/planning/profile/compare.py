"""Comparison of two profiles: the gain of a change of configuration or flags, part by part."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from megajax.costs.memory import GIB
from megajax.planning.collectives import Place
from megajax.planning.plan import columns
from megajax.planning.profile.profile import Profile, part_name


def compare(a: Profile, b: Profile) -> str:
    """Return a table of two profiles and their differences: step, parts, hidden collectives, loops and memory."""
    rows: list[tuple[str, ...]] = [("", "A", "B", "B - A"), _row("step", a.seconds, b.seconds)]
    rows += (_row(f"  {part_name(name)}", x, y) for name, x, y in _both(a.parts, b.parts))
    for axes in dict.fromkeys((*a.transfers, *b.transfers)):
        hidden = [profile.transfers.get(axes, (0.0, 0.0)) for profile in (a, b)]
        rows.append((f"  hidden over {axes}", *(f"{h / (h + e):.0%}" if h + e else "-" for h, e in hidden), ""))
    rows += (_row(f"  in {place}", x, y) for place, x, y in _both(a.places, b.places))
    peaks = [profile.peak.bytes / GIB for profile in (a, b)]
    rows.append(("temporary memory", *(f"{peak:.2f} GiB" for peak in peaks), f"{peaks[1] - peaks[0]:+.2f} GiB"))
    return columns(rows)


def _row(name: str, a: float, b: float) -> tuple[str, str, str, str]:
    return name, f"{a:.3f} s", f"{b:.3f} s", f"{b - a:+.3f} s"


def _both(
    a: Mapping[str, float] | Mapping[Place, float], b: Mapping[str, float] | Mapping[Place, float]
) -> Iterator[tuple[str, float, float]]:
    """Yield every name in either of them with both values, ordered by the larger value."""
    values = {name: (dict(a).get(name, 0.0), dict(b).get(name, 0.0)) for name in (*a, *b)}
    for name, (x, y) in sorted(values.items(), key=lambda item: -max(item[1])):
        yield name, x, y
