"""Timelines of pipeline schedules: a row per stage, time from left to right, as text or as a self-contained SVG.

If a schedule is too long to be read, a part of its middle, which repeats itself, is left out.
"""

from __future__ import annotations

import colorsys
from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass

from megajax.parallel.pipeline.schedule import BACKWARD, FORWARD, KINDS, Kind, Schedule, Work


def draw_text(schedule: Schedule, width: int = 200) -> str:
    """Draw a schedule as text in lines of at most `width` characters (or a handful of columns).

    A column is a moment at which some stage starts its work, so columns are not equally long in time. `F1.3` is the
    forward of microbatch 3 through chunk 1 (`F3` if there is one chunk), `B` is a backward, and `-` its continuation;
    `.` is the bubble, and `~` stands for the part that is left out.
    """
    moments = sorted({work.start for stage in schedule.stages for work in stage})
    cell = 1 + max(len(schedule.label(work)) for stage in schedule.stages for work in stage)
    names = _names(schedule)
    left = len(names[-1]) + 2
    window = _Window(len(moments), max((width - left) // cell, 8))
    lines = [summary(schedule)]
    for name, stage in zip(names, schedule.stages, strict=True):
        cells = ["~" if column == window.gap else "." for column in range(window.columns)]
        for work in stage:
            for i, column in enumerate(window.of(bisect_left(moments, work.start), bisect_left(moments, work.end))):
                cells[column] = "-" if i else schedule.label(work)
        lines.append((f"{name:<{left}}" + "".join(f"{text:<{cell}}" for text in cells)).rstrip())
    return "\n".join(lines) + "\n"


def summary(schedule: Schedule) -> str:
    """Return one line with sizes, bubble and activations in flight."""
    stages = len(schedule.stages)
    most = max(map(schedule.in_flight, range(stages)))
    return (
        f"{schedule.name} (stages {stages}, chunks {schedule.chunks}, microbatches {schedule.microbatches}): "
        f"bubble {schedule.bubble_fraction:.1%} of the ideal time, chunk activations in flight: {most} at most"
    )


CELL, ROW, LEFT, TOP, MARGIN = 20, 26, 72, 84, 16
"""Sizes in pixels: width of a time unit, height of a stage, left and upper edge of the timeline, margin."""
COLUMNS = 300
"""Longest timeline, in time units, that is drawn whole."""
HUES = {"F": 0.58, "B": 0.07}
"""Hues of forward (blue) and backward (orange), distinguishable by the colour-blind."""
INK, IDLE = "#1f2933", "#eceff2"


def draw_svg(schedule: Schedule) -> str:
    """Draw a schedule as an SVG document.

    A number names a microbatch and a shade a chunk; hovering over a cell shows the details.
    """
    window = _Window(schedule.length, COLUMNS)
    bottom = TOP + ROW * len(schedule.stages)
    title = summary(schedule)
    width = max(LEFT + CELL * window.columns + MARGIN, 8 * len(title) + 2 * MARGIN)
    height = bottom + 48
    body = [_text(MARGIN, 26, title, size=14), *_legend(schedule.chunks), *_axis(window, bottom)]
    for row, (name, stage) in enumerate(zip(_names(schedule), schedule.stages, strict=True)):
        y = TOP + ROW * row
        body += [_text(MARGIN, y + 17, name), _rect(LEFT, y, CELL * window.columns, IDLE)]
        body += [
            _cell(schedule, name, work, columns, y) for work in stage if (columns := window.of(work.start, work.end))
        ]
    if window.gap is not None:
        x = LEFT + CELL * window.gap
        body.append(_rect(x, TOP, CELL, "#ffffff", height=bottom - TOP))
        body.append(_text(x + CELL / 2, (TOP + bottom) / 2, "…", size=18, anchor="middle"))
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
            f'viewBox="0 0 {width} {height}" role="img" font-family="sans-serif" font-size="11" fill="{INK}">',
            f"<title>{title}</title>",
            '<rect width="100%" height="100%" fill="#ffffff"/>',
            *body,
            "</svg>\n",
        ]
    )


def _cell(schedule: Schedule, stage: str, work: Work, columns: list[int], y: int) -> str:
    x, width = LEFT + CELL * columns[0], CELL * len(columns)
    way = "forward" if work.kind == "F" else "backward"
    hint = f"{way}, chunk {work.chunk}, microbatch {work.microbatch}, {stage}, time {work.start} to {work.end}"
    fill, ink = _colors(work.kind, work.chunk, schedule.chunks)
    number = _text(x + width / 2, y + 17, str(work.microbatch), fill=ink, anchor="middle")
    return f"<g><title>{hint}</title>{_rect(x, y, width, fill)}{number}</g>"


def _legend(chunks: int) -> Iterator[str]:
    through = " through chunk" if chunks > 1 else ""
    forward, backward = ([_colors(kind, chunk, chunks) for chunk in range(chunks)] for kind in KINDS)
    keys = ((forward, f"forward{through}"), (backward, f"backward{through}"), ([(IDLE, INK)], "bubble"))
    x = LEFT
    for swatches, meaning in (*keys, ([], "number: microbatch")):
        for chunk, (fill, ink) in enumerate(swatches):
            number = str(chunk) if len(swatches) > 1 else ""
            yield _rect(x, 40, CELL, fill) + _text(x + CELL / 2, 57, number, fill=ink, anchor="middle")
            x += CELL
        yield _text(x + 6, 57, meaning)
        x += 7 * len(meaning) + CELL


def _axis(window: _Window, y: int) -> Iterator[str]:
    for time in range(0, window.length + 1, 10):
        for column in window.of(time, time + 1):
            x = LEFT + CELL * column
            yield f'<path d="M{x} {y}v5" stroke="{INK}"/>' + _text(x, y + 17, str(time), anchor="middle")
    yield _text(LEFT, y + 36, f"time: forward through a chunk {FORWARD}, backward {BACKWARD}")


def _colors(kind: Kind, chunk: int, chunks: int) -> tuple[str, str]:
    """Return the fill of a chunk, lighter for earlier ones, and a colour of text that is readable on it."""
    depth = chunk / (chunks - 1) if chunks > 1 else 0.3
    red, green, blue = colorsys.hls_to_rgb(HUES[kind], 0.8 - 0.44 * depth, 0.75)
    luma = 0.299 * red + 0.587 * green + 0.114 * blue
    return f"#{round(red * 255):02x}{round(green * 255):02x}{round(blue * 255):02x}", INK if luma > 0.5 else "#ffffff"


def _rect(x: float, y: float, width: float, fill: str, height: float = ROW) -> str:
    return f'<rect x="{x}" y="{y}" width="{width}" height="{height}" fill="{fill}" stroke="#ffffff"/>'


def _text(x: float, y: float, text: str, size: int = 11, fill: str = INK, anchor: str = "start") -> str:
    return f'<text x="{x:g}" y="{y}" font-size="{size}" fill="{fill}" text-anchor="{anchor}">{text}</text>'


def _names(schedule: Schedule) -> list[str]:
    return [f"stage {stage}" for stage in range(len(schedule.stages))]


@dataclass(frozen=True)
class _Window:
    """Choose the part of `length` columns to draw if there is room for `limit`: three quarters from the start, one from
    the end.
    """

    length: int
    limit: int

    @property
    def columns(self) -> int:
        return min(self.length, self.limit)

    @property
    def gap(self) -> int | None:
        """Return the column that stands for the part left out, or None if all is drawn."""
        return self.limit * 3 // 4 if self.length > self.limit else None

    def of(self, start: int, end: int) -> list[int]:
        """Return the places at which the columns `start` to `end` are drawn, or none if they are left out."""
        if self.gap is None:
            return list(range(start, end))
        left_out = self.length - self.limit
        first, last = range(start, min(end, self.gap)), range(max(start, self.gap + 1 + left_out), end)
        return [*first, *(column - left_out for column in last)]
