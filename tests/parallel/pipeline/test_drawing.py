"""Timelines of pipeline schedules, as text and as SVG."""

import re
from xml.etree import ElementTree

from megajax.parallel.pipeline.schedule import gpipe, interleaved, one_f_one_b
from megajax.planning.drawing import draw_svg, draw_text

SVG = "{http://www.w3.org/2000/svg}"


def test_text():
    assert draw_text(interleaved(stages=2, chunks=2, microbatches=2)) == (
        "interleaved 1F1B (stages 2, chunks 2, microbatches 2): bubble 25.0% of the ideal time, "
        "chunk activations in flight: 4 at most\n"
        "stage 0  F0.0 F0.1 F1.0 F1.1 .    .    B1.0 B1.1 B0.0 B0.1\n"
        "stage 1  .    F0.0 F0.1 F1.0 B1.0 F1.1 B1.1 B0.0 B0.1 .\n"
    )


def test_text_of_work_that_lasts():
    """A backward takes two forwards."""
    assert draw_text(one_f_one_b(stages=2, microbatches=3)).splitlines()[1:] == [
        "stage 0  F0 F1 .  B0 -  F2 B1 -  B2",
        "stage 1  .  F0 B0 F1 B1 -  F2 B2 .",
    ]


def test_long_text_keeps_start_and_end():
    lines = draw_text(gpipe(stages=2, microbatches=500), width=54).splitlines()[1:]
    assert lines == [
        "stage 0  F0   F1   F2   F3   F4   F5   ~    B498 B499",
        "stage 1  .    F0   F1   F2   F3   F4   ~    B499 .",
    ]


def test_svg_shows_all_work():
    schedule = interleaved(stages=3, chunks=2, microbatches=6)
    drawing = ElementTree.fromstring(draw_svg(schedule))
    cells = drawing.findall(f"{SVG}g")
    hints = [cell.find(f"{SVG}title").text for cell in cells]
    assert len(set(hints)) == 3 * 2 * 6 * 2
    assert hints[0] == "forward, chunk 0, microbatch 0, stage 0, time 0 to 1"
    assert [cell.find(f"{SVG}text").text for cell in cells[:4]] == ["0", "1", "2", "0"]
    # One fill per direction and chunk, and none of them is the bubble's.
    fills = {cell.find(f"{SVG}rect").get("fill") for cell in cells}
    assert len(fills) == 4
    assert fills < {rect.get("fill") for rect in drawing.findall(f"{SVG}rect")}
    title = drawing.find(f"{SVG}title").text
    assert title.startswith("interleaved 1F1B (stages 3, chunks 2, microbatches 6): bubble 16.7%")


def test_long_svg_keeps_start_and_end():
    text = draw_svg(gpipe(stages=2, microbatches=500))
    assert ElementTree.fromstring(text).get("width") == str(72 + 300 * 20 + 16)
    assert "…" in text
    shown = [int(number) for number in re.findall(r"forward, chunk 0, microbatch (\d+), stage 0", text)]
    assert shown == list(range(225))
    assert "backward, chunk 0, microbatch 499, stage 0, time 1501 to 1503" in text
