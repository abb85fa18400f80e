"""The pieces of an HTML page that is one file: its frame and style, tables, bars and pictures.

Nothing is loaded and no script runs. There are colours for light and dark screens; paper is A4 landscape.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from string import Template

PAGE = Template("""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8"/>
<meta name="viewport" content="width=device-width, initial-scale=1"/>
<title>$title</title>
<style>$style</style>
</head>
<body>
<header>
<h1>$title</h1>
<p>$layout</p>
</header>
<main>
$body
</main>
<footer>
<p>Closed form: nothing was compiled or measured. Not in the memory: $reserved GiB a GPU for the CUDA context, NCCL and
fragments. Not in the time: reading data, evaluation, checkpoints, slow devices, a network that others use.
1 GiB is 2<sup>30</sup> bytes.</p>
</footer>
</body>
</html>
""")

STYLE = """
:root { color-scheme: light dark; --ink: #1f2933; --soft: #5b6672; --page: #fff; --card: #f6f8fa; --line: #d5dbe1;
  --idle: #e3e8ed; --work: #4a86cf; --send: #e8893b; --good: #1a7f4b; --bad: #c0362c; }
@media screen and (prefers-color-scheme: dark) { :root { --ink: #e6eaee; --soft: #a3adb8; --page: #14181d;
  --card: #1d232a; --line: #39424d; --idle: #333c47; --good: #58c98f; --bad: #ff8379; } }
* { box-sizing: border-box; print-color-adjust: exact; -webkit-print-color-adjust: exact; }
body { margin: 0 auto; max-width: 1248px; padding: 20px 24px; background: var(--page); color: var(--ink);
  font: 14px/1.45 system-ui, "Segoe UI", "Liberation Sans", sans-serif; font-variant-numeric: tabular-nums; }
h1 { font-size: 24px; line-height: 1.2; margin: 0 0 4px; }
h2 { font-size: 16px; margin: 0 0 8px; }
p { margin: 0 0 8px; } header p, .note, footer, .tile small { color: var(--soft); } footer, .note { font-size: 12.5px; }
main { display: grid; grid-template-columns: 1fr 1fr; gap: 14px; margin: 14px 0; }
section { background: var(--card); border: 1px solid var(--line); border-radius: 8px; padding: 14px 16px;
  min-width: 0; break-inside: avoid; }
.wide { grid-column: 1 / -1; } .column { display: flex; flex-direction: column; gap: 14px; min-width: 0; }
.column section:last-child { flex: 1; }
.tiles { display: grid; grid-template-columns: repeat(6, 1fr); padding: 0; }
.tile { padding: 12px 16px; border-left: 1px solid var(--line); } .tile:first-child { border: 0; }
.tile b, .tile small { display: block; } .tile b { font-size: 19px; white-space: nowrap; }
.good { color: var(--good); } .bad { color: var(--bad); }
table { border-collapse: collapse; width: 100%; margin: 0 0 10px; font-size: 13px; }
th, td { text-align: right; padding: 3px 0 3px 12px; font-weight: normal; border-top: 1px solid var(--line); }
thead th { color: var(--soft); border: 0; vertical-align: bottom; }
th:first-child { text-align: left; padding-left: 0; }
td.text, th.text { text-align: left; } tr.strong > * { font-weight: bold; }
th small { color: var(--soft); font-size: 12px; }
td:has(.bar) { width: 34%; } .bar { display: block; height: 11px; min-width: 1px; border-radius: 2px; }
.swatch { display: inline-block; width: 11px; height: 11px; border-radius: 2px; margin-right: 7px; }
svg { display: block; width: 100%; } svg text { fill: var(--ink); font-size: 12.5px; } .stack { margin-bottom: 8px; }
.track { fill: var(--idle); } .mark { stroke: var(--ink); stroke-dasharray: 4 3; } svg .soft { fill: var(--soft); }
.timeline { display: flex; gap: 8px; margin-bottom: 8px; }
.timeline svg { flex: 1; min-width: 0; background: var(--idle); }
.timeline rect { stroke: var(--page); } .timeline g text { font-size: 11px; } .timeline .gap { fill: var(--page); }
.stages { display: flex; flex-direction: column; justify-content: space-between; font-size: 12px; white-space: nowrap; }
.stages.all span { flex: 1; display: flex; align-items: center; }
@media screen and (max-width: 900px) { main { grid-template-columns: 1fr; } section { overflow-x: auto; }
  .tiles { grid-template-columns: repeat(3, 1fr); } }
@page { size: A4 landscape; margin: 10mm; }
@media print { body { padding: 0; zoom: 0.75; } }
"""


def section(title: str, *parts: str, wide: bool = False) -> str:
    """A card with a heading; `wide`: over both columns."""
    start = '<section class="wide">' if wide else "<section>"
    return "\n".join((start, f"<h2>{escape(title)}</h2>", *parts, "</section>"))


def column(*sections: str) -> str:
    """Cards below one another."""
    return f'<div class="column">{"".join(sections)}</div>'


def note(text: str) -> str:
    """A paragraph in small print."""
    return f'<p class="note">{escape(text)}</p>'


def tiles(facts: Iterable[tuple[str, str]]) -> str:
    """Numbers, which are HTML, and below each what it is."""
    cells = (f'<div class="tile"><b>{number}</b><small>{escape(meaning)}</small></div>' for number, meaning in facts)
    return f'<section class="wide tiles">{"".join(cells)}</section>'


def table(head: Sequence[str], rows: Iterable[Sequence[str]], strong: int | None = None) -> str:
    """A table of HTML cells, whose first column names the rows; the row `strong` stands out.

    Numbers are right-aligned; a column whose heading begins with a blank is text.
    """
    words = [' class="text"' if name.startswith(" ") else "" for name in head]
    lines = [_row("col", head, ["th"] * len(head), words)]
    for number, row in enumerate(rows):
        tags = ["th", *["td"] * (len(row) - 1)]
        lines.append(_row("row", row, tags, words, ' class="strong"' if number == strong else ""))
    return f"<table><thead>{lines[0]}</thead><tbody>{''.join(lines[1:])}</tbody></table>"


def _row(scope: str, cells: Sequence[str], tags: Sequence[str], words: Sequence[str], kind: str = "") -> str:
    scopes = [f' scope="{scope}"' if tag == "th" else "" for tag in tags]
    made = (f"<{tag}{s}{word}>{cell}</{tag}>" for tag, s, word, cell in zip(tags, scopes, words, cells, strict=True))
    return f"<tr{kind}>{''.join(made)}</tr>"


def bar(share: float, color: str) -> str:
    """A cell of a table that shows a share of the longest, in a colour of the page: work, send or soft."""
    return f'<span class="bar" style="width:{100 * share:.1f}%;background:var(--{color})"></span>'


def swatch(color: str) -> str:
    """The key to a colour."""
    return f'<span class="swatch" style="background:{color}"></span>'


def svg(title: str, box: tuple[float, float, float, float], body: Iterable[str], attributes: str = "") -> str:
    """A picture as wide as its place; `box` is x, y, width, height of what it shows."""
    view = " ".join(f"{number:g}" for number in box)
    return f'<svg role="img" viewBox="{view}" {attributes}><title>{escape(title)}</title>{"".join(body)}</svg>'
