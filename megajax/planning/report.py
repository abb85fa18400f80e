"""HTML page of a plan: memory, time, communication, arithmetic, pipeline and, after a search, its layouts.

The page is a single file without scripts, and it loads nothing. Every picture has its numbers beside or inside it, for
paper and for screen readers.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from html import escape
from string import Template

from megajax.config.parallel import AXES
from megajax.costs.device import Device
from megajax.costs.memory import GIB, StageMemory
from megajax.parallel.pipeline.schedule import Schedule, interleaved, one_f_one_b
from megajax.planning.drawing import CELL, COLUMNS, LEFT, ROW, TOP, draw_svg, summary
from megajax.planning.layouts import layout_name
from megajax.planning.plan import Plan
from megajax.planning.roofline import LABELS
from megajax.planning.search import Candidate

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
    """Return a card with a heading, over both columns if `wide`."""
    start = '<section class="wide">' if wide else "<section>"
    return "\n".join((start, f"<h2>{escape(title)}</h2>", *parts, "</section>"))


def column(*sections: str) -> str:
    """Return cards below one another."""
    return f'<div class="column">{"".join(sections)}</div>'


def note(text: str) -> str:
    """Return a paragraph in small print."""
    return f'<p class="note">{escape(text)}</p>'


def tiles(facts: Iterable[tuple[str, str]]) -> str:
    """Return a row of numbers (HTML), each with its meaning below."""
    cells = (f'<div class="tile"><b>{number}</b><small>{escape(meaning)}</small></div>' for number, meaning in facts)
    return f'<section class="wide tiles">{"".join(cells)}</section>'


def table(head: Sequence[str], rows: Iterable[Sequence[str]], strong: int | None = None) -> str:
    """Return a table of HTML cells whose first column names the rows; the row `strong` stands out.

    Numbers are right-aligned; a column whose heading begins with a space is text.
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
    """Return a table cell that shows a share of the longest bar, in a colour of the page: work, send or soft."""
    return f'<span class="bar" style="width:{100 * share:.1f}%;background:var(--{color})"></span>'


def swatch(color: str) -> str:
    """Return the key to a colour."""
    return f'<span class="swatch" style="background:{color}"></span>'


def svg(title: str, box: tuple[float, float, float, float], body: Iterable[str], attributes: str = "") -> str:
    """Return a picture that fills its place's width; `box` is x, y, width and height of the visible part."""
    view = " ".join(f"{number:g}" for number in box)
    return f'<svg role="img" viewBox="{view}" {attributes}><title>{escape(title)}</title>{"".join(body)}</svg>'


MEMORY = {
    "weights": ("fp32 master", "#1d4f91"),
    "optimizer": ("fp32 moments", "#4a86cf"),
    "gradients": ("sums over a step", "#9cc3ef"),
    "compute_copy": ("weights, cast", "#2a9d8f"),
    "activations": ("saved for the backward pass", "#e8893b"),
    "logits": ("and gradients of the vocabulary", "#b5478f"),
    "workspace": ("of the layers at work", "#8a8f98"),
}
"""Fields of StageMemory -> explanation and colour."""
LAYOUTS = 20
"""Number of layouts that are listed after a search."""
WIDTH, READABLE = 1150, 14
"""Width of a pipeline on the page, and of the narrowest cell with room for its number, in pixels."""


def html_report(plan: Plan, candidates: Sequence[Candidate] = ()) -> str:
    """Return the page of a plan.

    Args:
        plan: plan that the page shows.
        candidates: layouts of a search, the fastest first; those beyond `LAYOUTS` are only counted.
    """
    whose = "" if plan.like == "megajax" else ", as Megatron-LM would hold and run it"
    train = plan.config.train
    left = [_memory(plan), *([_communication(plan)] if plan.communication else [])]
    sections = [_answers(plan), column(*left), column(_time(plan), _arithmetic(plan))]
    if plan.mesh["pipe"] > 1:
        sections.append(_pipeline(plan))
    if candidates:
        sections.append(_layouts(plan, candidates))
    return PAGE.substitute(
        title=escape(f"{_count(plan.parameters)} parameters on {plan.gpus:,} x {plan.gpu.name}{whose}"),
        layout=escape(
            f"{layout_name(plan.config)} micro_batch={train.micro_batch_size}; a step is {train.global_batch_size:,} "
            f"samples of {plan.config.data.seq_length:,} tokens, in {train.precision}"
        ),
        style=STYLE,
        body="\n".join(sections),
        reserved=f"{(plan.gpu.memory_bytes - plan.limit) / GIB:.1f}",
    )


def _answers(plan: Plan) -> str:
    time = plan.time
    fits = '<span class="good">fits</span>' if plan.fits else '<span class="bad">does not fit</span>'
    return tiles(
        (
            (fits, f"{plan.need / GIB:.1f} of {plan.limit / GIB:.1f} GiB a GPU"),
            (f"{time.seconds:.4g} s", "a step"),
            (f"{plan.tokens_per_second:,.0f}", "tokens/s on all GPUs"),
            (f"{time.mfu('full'):.1%}", f"MFU, counting full attention; {time.mfu('causal'):.1%} causal"),
            (f"{plan.days:,.1f} days", f"for {_count(plan.tokens)} tokens"),
            (_count(plan.gpu_hours), "GPU-hours for them"),
        )
    )


def _memory(plan: Plan) -> str:
    stages = {f"{name} stage": memory for name, memory in plan.stages.items()}
    if plan.mesh["pipe"] == 1:
        stages = {"every GPU": plan.stages["first"]}
    rows = [
        (
            f"{swatch(color)}{field.replace('_', ' ')} <small>{meaning}</small>",
            *(f"{getattr(memory, field) / GIB:,.2f}" for memory in stages.values()),
        )
        for field, (meaning, color) in MEMORY.items()
    ]
    rows.append(("total", *(f"{memory.total / GIB:,.2f}" for memory in stages.values())))
    numbers = table(("GiB", *stages), rows, strong=len(MEMORY))
    return section("Memory of a GPU", _stack(plan, stages), numbers, note(f"It {plan.verdict}."))


def _stack(plan: Plan, stages: dict[str, StageMemory]) -> str:
    """Return a picture of a bar for each stage over the memory of a GPU."""
    width, step, thick, memory_bytes = 560, 46, 22, plan.gpu.memory_bytes
    scale = width / max(memory_bytes, plan.need)
    bottom, limit = step * len(stages) + 6, plan.limit * scale
    body = []
    for row, (name, memory) in enumerate(stages.items()):
        x, y = 0.0, step * row + 20
        body.append(f'<text x="0" y="{y - 6}">{name}: {memory.total / GIB:.1f} GiB</text>')
        body.append(f'<rect class="track" x="0" y="{y}" width="{memory_bytes * scale:.1f}" height="{thick}"/>')
        for field, (_, color) in MEMORY.items():
            size = getattr(memory, field)
            hint = f"<title>{field.replace('_', ' ')}: {size / GIB:.2f} GiB</title>"
            shape = f'x="{x:.1f}" y="{y}" width="{size * scale:.1f}" height="{thick}"'
            body.append(f'<rect {shape} fill="{color}">{hint}</rect>')
            x += size * scale
    what = f"{plan.limit / GIB:.1f} GiB for arrays, of {memory_bytes / GIB:.1f} GiB"
    body.append(f'<path class="mark" d="M{limit:.1f} 4V{bottom + 4}"/>')
    body.append(f'<text class="soft" x="{limit - 5:.1f}" y="{bottom + 12}" text-anchor="end">{what}</text>')
    return svg(f"Memory of a GPU by stage: {plan.verdict}", (0, 0, width, bottom + 18), body, 'class="stack"')


def _time(plan: Plan) -> str:
    time = plan.time
    parts = sorted(((name, seconds) for name, seconds in time.parts.items() if seconds), key=lambda part: -part[1])
    rows = []
    for name, seconds in parts:
        color = "send" if name in AXES else "soft" if name == "bubble" else "work"
        rows.append(
            (LABELS[name], bar(seconds / parts[0][1], color), f"{seconds:.3f}", f"{seconds / time.seconds:.1%}")
        )
    rows.append(("step", "", f"{time.seconds:.3f}", "100.0%"))
    return section(
        "Time of a step",
        f"<p>What limits it: {time.limit}.</p>",
        table(("part", "", "seconds", "share"), rows, strong=len(parts)),
        note("Blue is work, orange communication as far as no work hides it, grey waiting."),
    )


def _arithmetic(plan: Plan) -> str:
    rows = []
    for convention, flops in plan.flops.items():
        hardware = f"{plan.hardware_flops[convention] / 1e15:,.4g}" if plan.hardware_flops else "-"
        speed = f"{plan.time.tflops(convention):,.0f}", f"{plan.time.mfu(convention):.1%}"
        rows.append((f"{convention} attention", f"{flops.model / 1e15:,.4g}", hardware, *speed))
    head = ("counting", "model<br/>PFLOP a step", "with recom-<br/>putation", "model<br/>TFLOP/s a GPU", "MFU")
    peak = f"Peak of one {plan.gpu.name}: {plan.time.peak / 1e12:,.0f} TFLOP/s."
    share = f"{plan.time.hfu:.1%} of it are reached with all that is executed, recomputation too (HFU)."
    return section("Arithmetic", table(head, rows), note(f"{peak} {share}"))


def _communication(plan: Plan) -> str:
    most = max(sent.bytes for sent in plan.communication.values()) or 1
    rows = [
        (
            axis,
            f"{plan.mesh[axis]}",
            sent.wire,
            bar(sent.bytes / most, "send"),
            f"{sent.bytes / GIB:,.1f}",
            f"{sent.seconds:.3f}",
            f"{sent.seconds / plan.time.seconds:.1%}",
        )
        for axis, sent in plan.communication.items()
    ]
    head = ("axis", "GPUs", " wire", "", "GiB a step", "exposed<br/>seconds", "of the<br/>step")
    what = "Bytes of whole tensors that a GPU takes part in sending; exposed is what no work hides."
    return section("Communication of a GPU, by mesh axis", table(head, rows), note(what))


def _pipeline(plan: Plan) -> str:
    stages, chunks, count = plan.mesh["pipe"], plan.config.parallel.chunks, Device.of(plan.config).microbatches
    out_of_step = plan.like == "megatron" and chunks == 1
    schedule = one_f_one_b(stages, count) if out_of_step else interleaved(stages, chunks, count)
    key = "Time runs from left to right. Blue is forward, orange backward, grey the bubble."
    key += " The darker a colour, the later the chunk of layers." if chunks > 1 else ""
    key += " A part of the middle, which repeats itself, is left out." if schedule.length > COLUMNS else ""
    return section("Pipeline of a step", f"<p>{summary(schedule)}.</p>", _timeline(schedule), note(key), wide=True)


def _timeline(schedule: Schedule) -> str:
    """Return the cells of `draw_svg`, fitted to the page, without numbers where they would not be readable."""
    stages, columns = len(schedule.stages), min(schedule.length, COLUMNS)
    width, height = CELL * columns, ROW * stages
    cells = re.findall(r"<g>.*?</g>", draw_svg(schedule))
    style = f'style="max-width:{1.2 * width:.0f}px"'
    if WIDTH / columns < READABLE:
        cells = [re.sub(r'<(title|text)\b.*?</\1>|</?g>| stroke="\S+?"', "", cell) for cell in cells]
        style = f'style="height:{stages * min(20, max(5, 480 // stages))}px" preserveAspectRatio="none"'
    if schedule.length > COLUMNS:
        x = LEFT + CELL * (COLUMNS * 3 // 4)
        cells.append(f'<rect class="gap" x="{x}" y="{TOP}" width="{CELL}" height="{height}"/>')
        cells.append(f'<path class="mark" d="M{x + CELL / 2:g} {TOP}v{height}" vector-effect="non-scaling-stroke"/>')
    every = stages <= 16
    names = "".join(f"<span>stage {stage}</span>" for stage in (range(stages) if every else (0, stages - 1)))
    labels = f'<div class="stages{" all" if every else ""}" aria-hidden="true">{names}</div>'
    return f'<div class="timeline">{labels}{svg(summary(schedule), (LEFT, TOP, width, height), cells, style)}</div>'


def _layouts(plan: Plan, candidates: Sequence[Candidate]) -> str:
    here = next(
        (i for i, candidate in enumerate(candidates) if candidate.config.parallel == plan.config.parallel), None
    )
    shown = list(enumerate(candidates))[:LAYOUTS]
    if here is not None and here >= LAYOUTS:
        shown.append((here, candidates[here]))
    axes = [axis for axis in AXES if any(candidate.mesh[axis] > 1 for _, candidate in shown)]
    rows = []
    for rank, candidate in shown:
        parallel, train, time = candidate.config.parallel, candidate.config.train, candidate.time
        count = Device.of(candidate.config).microbatches
        numbers = (parallel.chunks, parallel.zero, train.remat, train.micro_batch_size, count)
        cells = (*(candidate.mesh[axis] for axis in axes), *numbers, f"{candidate.memory / GIB:.1f}")
        speed = (f"{time.seconds:.3f}", f"{time.tokens_per_second:,.0f}", f"{time.mfu('full'):.1%}") if time else "---"
        rows.append((f"{rank + 1}", *map(str, cells), *speed, candidate.verdict))
    head = ("rank", *axes, "chunks", "ZeRO", "recompute", "micro<br/>batch", "micro-<br/>batches", "GiB", "step, s")
    fit = sum(candidate.time is not None for candidate in candidates)
    what = f"{len(candidates):,} legal layouts of {plan.gpus:,} GPUs; {fit:,} fit; {len(shown)} are listed."
    units = "GiB are those of arrays; MFU with full attention."
    bold = "In bold the layout of this page, with the micro batch and recomputation that suit it best."
    return section(
        "Layouts, the fastest first",
        table((*head, "tokens/s", "MFU", " verdict"), rows, strong=None if here is None else min(here, LAYOUTS)),
        note(f"{what} {units} {bold if here is not None else ''}"),
        wide=True,
    )


def _count(number: float) -> str:
    """Return a large number in words."""
    for size, name in ((1e12, "trillion"), (1e9, "billion"), (1e6, "million")):
        if number >= 0.9995 * size:
            return f"{number / size:,.4g} {name}"
    return f"{number:,.0f}"
