"""The report is one well-formed page with the plan's numbers; in a browser no text overlaps or is cut off."""

from __future__ import annotations

import html
import json
import re
import shutil
import subprocess
from functools import cache
from pathlib import Path
from xml.etree import ElementTree

import pytest

from megajax.config.load import load_config
from megajax.costs.hardware import gpu_named
from megajax.costs.memory import GIB
from megajax.planning.plan import Plan, plan
from megajax.planning.report import LAYOUTS, html_report
from megajax.planning.roofline import LABELS
from megajax.planning.search import Candidate, search_layouts

PLANS = {
    # model, layout, batch, GPU, GPUs, like
    "175B": ("megatron_175b", "tensor=8 pipe=8 chunks=3 zero=1", 128, "h100", 128, "megajax"),
    "1T": ("megatron_1t", "tensor=8 pipe=64", 512, "h100", 512, "megajax"),
    "too large": ("megatron_22b", "tensor=2 pipe=4", 8, "a100-40gb", 8, "megatron"),
    "one GPU": ("gpt2_124m", "data=1", 8, "h200", 1, "megajax"),
}


@cache
def planned(name: str) -> Plan:
    model, layout, batch, gpu, gpus, like = PLANS[name]
    words = ["train.precision=bf16", f"train.global_batch_size={batch}"]
    words += [f"parallel.{word}" for word in layout.split()]
    return plan(load_config(f"models/{model}.yaml", words).config, gpu=gpu, gpus=gpus, like=like)


@pytest.fixture(scope="module")
def ranking() -> list[Candidate]:
    return search_layouts(planned("too large").config, gpu_named("h100"), 8)


def tables(page: str) -> dict[str, list[list[str]]]:
    """Cells by the heading of their section; fails if the page is not well-formed."""
    tree = ElementTree.fromstring(page.removeprefix("<!DOCTYPE html>"))
    found = {}
    for section in tree.iter("section"):
        rows = [["".join(cell.itertext()) for cell in row] for row in section.iter("tr")]
        found["".join(heading.text or "" for heading in section.iter("h2"))] = rows
    return found


@pytest.mark.parametrize("name", PLANS)
def test_one_file_that_loads_nothing(name: str, ranking: list[Candidate]) -> None:
    page = html_report(planned(name), ranking)
    assert not re.search(r"https?:|//|src=|href=|url\(|@import|<script|<link", page)
    assert tables(page)
    assert len(page) < 2**20


@pytest.mark.parametrize("name", PLANS)
def test_numbers(name: str) -> None:
    subject = planned(name)
    page, found = html_report(subject), tables(html_report(subject))
    memory = found["Memory of a GPU"]
    assert [float(cell) for cell in memory[-1][1:]] == [
        pytest.approx(stage.total / GIB, abs=0.005)
        for stage in (subject.stages.values() if subject.mesh["pipe"] > 1 else [subject.stages["first"]])
    ]
    for _, *column in zip(*memory, strict=True):
        if column[0] != "GiB" and column[0][:1].isdigit():
            assert sum(map(float, column[:-1])) == pytest.approx(float(column[-1]), abs=0.04)
    times = {row[0]: row[2] for row in found["Time of a step"][1:]}
    assert times.pop("step") == f"{subject.time.seconds:.3f}"
    assert times == {LABELS[part]: f"{seconds:.3f}" for part, seconds in subject.time.parts.items() if seconds}
    sent = {row[0]: (row[1], row[2]) for row in found.get("Communication of a GPU, by mesh axis", [[]])[1:]}
    assert sent == {axis: (str(subject.mesh[axis]), s.wire) for axis, s in subject.communication.items()}
    assert [row[4] for row in found["Arithmetic"][1:]] == [f"{subject.time.mfu(c):.1%}" for c in subject.flops]
    assert f"{subject.tokens_per_second:,.0f}" in page
    assert f"{subject.days:,.1f} days" in page
    assert (">fits<" in page, ">does not fit<" in page) == (subject.fits, not subject.fits)


def test_pipeline() -> None:
    """A short one is drawn with its numbers, cell by cell; a long one without, and without its middle."""
    short, long, none = (html_report(planned(name)) for name in ("too large", "1T", "one GPU"))
    assert len(re.findall(r"<g><title>", short)) == 4 * 8 * 2
    assert "bubble 37.5% of the ideal time" in short
    assert 'class="gap"' in long
    assert "<g>" not in long
    assert "Pipeline of a step" not in none


def test_layouts(ranking: list[Candidate]) -> None:
    """The fastest, and the layout of the page wherever it ranks."""
    page = html_report(planned("too large"), ranking)
    head, *rows = tables(page)["Layouts, the fastest first"]
    assert [row[-1] for row in rows[:LAYOUTS]] == [candidate.verdict for candidate in ranking[:LAYOUTS]]
    seconds = head.index("step, s")
    assert rows[0][seconds] == f"{ranking[0].time.seconds:.3f}"
    place = [candidate.config.parallel for candidate in ranking].index(planned("too large").config.parallel)
    strong = re.findall(r'<tr class="strong"><th scope="row">(\d+)</th>', page)
    assert strong == [str(place + 1)]


BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
FIND = """<script>
const texts = [], found = [], walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
while (walker.nextNode()) {
  const node = walker.currentNode, range = document.createRange();
  if (!node.data.trim() || node.parentElement.closest("title, script")) continue;
  range.selectNodeContents(node);
  const around = node.parentElement.closest("svg, td, th, .tile, section, header, footer").getBoundingClientRect();
  for (const box of range.getClientRects()) {
    if (box.left < around.left - 1 || box.right > around.right + 1 || box.top < around.top - 1
        || box.bottom > around.bottom + 1) found.push("cut off: " + node.data);
    for (const [other, words] of texts)
      if (Math.min(box.right, other.right) - Math.max(box.left, other.left) > 1
          && Math.min(box.bottom, other.bottom) - Math.max(box.top, other.top) > 1)
        found.push("overlap: " + words + " / " + node.data);
    texts.push([box, node.data]);
  }
}
if (document.documentElement.scrollWidth > innerWidth) found.push("wider than the window");
document.title = JSON.stringify({texts: texts.length, width: innerWidth, found});
</script>"""
"""Lays the page out and writes into its title what is wrong with it."""


def look(page: str, directory: Path) -> dict[str, object]:
    """What a browser of 1280 pixels finds."""
    file = directory / "report.html"
    file.write_text(page.replace("</body>", f"{FIND}</body>"), encoding="utf-8")
    flags = ["--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--window-size=1280,1000"]
    command = [BROWSER, *flags, f"--user-data-dir={directory / 'profile'}", "--dump-dom", file.as_uri()]
    dom = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout
    return json.loads(html.unescape(re.search(r"<title>(.*?)</title>", dom, re.DOTALL)[1]))


@pytest.mark.skipif(BROWSER is None, reason="needs Chromium (Debian: apt-get install chromium)")
@pytest.mark.parametrize("name", PLANS)
def test_no_text_overlaps_in_a_browser(name: str, ranking: list[Candidate], tmp_path: Path) -> None:
    seen = look(html_report(planned(name), ranking), tmp_path)
    assert (seen["width"], seen["found"]) == (1280, [])
    assert seen["texts"] > 300


@pytest.mark.skipif(BROWSER is None, reason="needs Chromium (Debian: apt-get install chromium)")
def test_the_browser_would_see_it(tmp_path: Path) -> None:
    page = html_report(planned("too large")).replace("svg text {", "svg text { font-size: 60px !important;")
    found = look(page, tmp_path)["found"]
    assert {problem.split(":")[0] for problem in found} == {"cut off", "overlap"}
