"""`python -m megajax.plan CONFIG [key=value ...] --gpu h100 --gpus N`: plan memory, traffic and speed of a run.

It tells whether the run fits, what it sends and how fast it is; no GPU is needed. `--search` ranks every legal layout
instead of planning the configured one; `--compile` compiles the real step for the GPU as well, and profiles it: where
its time goes and what holds its memory, by XLA's own schedule. `--compare A B` profiles two variants.

Exit code 3 says that the run does not fit; stderr names the smallest change with which it would. Exit code 4 says that
what the compiled program sends over an axis in one of its loops, or multiplies, differs from the closed form by more
than 5 %; stderr names axis and loop.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from pathlib import Path
from typing import Any

from megajax.config import Config, InputError
from megajax.config.cli import entry_point, parse_command_line
from megajax.costs.hardware import gpu_named
from megajax.costs.memory import GIB
from megajax.files import write_text
from megajax.interop.init_from import start_of
from megajax.planning.compiled import CompiledPlan
from megajax.planning.deviceless import compile_plan, has_compiler
from megajax.planning.layouts import layout_name
from megajax.planning.plan import TOKENS, Plan, columns, plan, with_vocabulary
from megajax.planning.profile.compare import compare
from megajax.planning.profile.profile import Profile
from megajax.planning.profile.trace import write_trace
from megajax.planning.report import html_report
from megajax.planning.search import Candidate, search_layouts, smallest_remedy

DOES_NOT_FIT = 3
DIFFERS = 4


@entry_point
def main(argv: list[str]) -> int:
    """Run the command line and return the exit code that the module describes."""
    title = "Plan a run without any GPU: memory, communication, time and cost."
    loaded, options = parse_command_line("python -m megajax.plan", title, argv, start_of, _add_options)
    if options.like == "megatron" and (options.search or options.compile or options.compare):
        raise InputError("--search, --compile and --compare are about this implementation: leave --like megatron out")
    if options.trace and not options.compile:
        raise InputError("--trace writes the profile of a compiled program: add --compile")
    if options.compare:
        return _compare(title, options)
    if options.trace:
        _require_compiler()
    config, candidates = loaded.config, []
    if options.search:
        candidates = _search(config, options)
        config = candidates[0].config
        print(_ranking(candidates[: options.top]), end="\n\n")
    planned = plan(config, options.gpu, options.gpus, options.like, options.tokens)
    print(planned)
    compiled = compile_plan(planned) if options.compile else None
    if compiled:
        print(f"\n{compiled}")
    remedy = None if planned.fits else smallest_remedy(planned)
    if options.json:
        answer: dict[str, Any] = planned.as_dict() | {"remedy": remedy[0] if remedy else None}
        answer["candidates"] = [_candidate(candidate) for candidate in candidates[: options.top]]
        answer["compiled"] = compiled.as_dict() if compiled else None
        write_text(options.json, json.dumps(answer, indent=2) + "\n")
    if options.trace and compiled:
        write_trace(_profile(compiled), options.trace)
    if options.html:
        write_text(options.html, html_report(planned, candidates))
    differences = compiled.differences if compiled else ()
    if differences:
        print(f"megajax: program and closed form differ: {'; '.join(differences)}", file=sys.stderr)
    if planned.fits and (compiled is None or compiled.fits):
        return DIFFERS if differences else 0
    print(f"megajax: {_failure(planned, compiled, remedy)}", file=sys.stderr)
    return DOES_NOT_FIT


def _compare(title: str, options: argparse.Namespace) -> int:
    """Profile two variants of the command line, each with words of its own: KEY=VALUE, or flags of XLA."""
    for name in ("search", "compile", "json", "html", "trace"):
        if getattr(options, name):
            raise InputError(f"--compare prints two profiles and nothing else: leave --{name} out")
    _require_compiler()
    variants = []
    for words in map(_split, options.compare):
        flags = [f"--{word}" for word in words if word.startswith("xla_")]
        changes = [word for word in words if not word.startswith("xla_")]
        loaded, _ = parse_command_line("python -m megajax.plan", title, [*options.words, *changes], start_of)
        variants.append((plan(loaded.config, options.gpu, options.gpus), flags))
    profiles = [_profile(compile_plan(planned, flags)) for planned, flags in variants]
    print("\n".join(f"{name}: {words or 'as given'}" for name, words in zip("AB", options.compare, strict=True)))
    print(compare(*profiles))
    return 0


def _split(words: str) -> list[str]:
    try:
        return shlex.split(words)
    except ValueError as error:
        raise InputError(f"--compare {words!r}: {error}") from None


def _require_compiler() -> None:
    if not has_compiler():
        raise InputError("a profile needs JAX's CUDA plugin (pip install 'megajax[cuda13]'), which compiles for GPUs")


def _profile(compiled: CompiledPlan) -> Profile:
    assert compiled.profile is not None  # there is a compiler for GPUs
    return compiled.profile


def _add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--gpu", default="h100", metavar="NAME", help="type of the GPUs (default: h100)")
    parser.add_argument("--gpus", type=int, metavar="N", help="number of GPUs (default: as few as the mesh takes)")
    parser.add_argument("--search", action="store_true", help="rank every legal layout, then plan the fastest")
    parser.add_argument(
        "--top", type=int, default=10, metavar="N", help="with --search: number of layouts to list (default: 10)"
    )
    parser.add_argument(
        "--compile", action="store_true", help="compile the real step for the GPU, and compare it with the plan"
    )
    parser.add_argument(
        "--compare",
        nargs=2,
        metavar=("A", "B"),
        help="profile two variants: each a text of KEY=VALUE words and flags such as xla_gpu_...=true, or empty",
    )
    parser.add_argument("--trace", type=Path, metavar="FILE", help="with --compile: write a trace for ui.perfetto.dev")
    parser.add_argument(
        "--like",
        choices=("megajax", "megatron"),
        default="megajax",
        help="program to plan: megajax, or megatron as published figures measure it (default: megajax)",
    )
    parser.add_argument(
        "--tokens",
        type=float,
        default=TOKENS,
        metavar="N",
        help="number of tokens to train on, for time and cost (default: 300e9)",
    )
    parser.add_argument(
        "--json", type=Path, metavar="FILE", help="write the whole plan as JSON (planning/schema.py explains the keys)"
    )
    parser.add_argument("--html", type=Path, metavar="FILE", help="write a report as one page for any browser")


def _search(config: Config, options: argparse.Namespace) -> list[Candidate]:
    if options.gpus is None:
        raise InputError("--search spreads the model over a number of GPUs: give --gpus N")
    if options.gpus < 1 or options.top < 1:
        raise InputError("--gpus and --top count from 1")
    return search_layouts(with_vocabulary(config), gpu_named(options.gpu), options.gpus)


def _ranking(candidates: list[Candidate]) -> str:
    rows = [("layout", "step", "GiB", "why")]
    for candidate in candidates:
        seconds = f"{candidate.time.seconds:.3f} s" if candidate.time else "-"
        name = f"{layout_name(candidate.config)} micro_batch={candidate.config.train.micro_batch_size}"
        rows.append((name, seconds, f"{candidate.memory / GIB:.1f}", candidate.verdict))
    return columns(rows, left=(0, 3))


def _candidate(candidate: Candidate) -> dict[str, Any]:
    return {
        "layout": layout_name(candidate.config),
        "micro_batch_size": candidate.config.train.micro_batch_size,
        "mesh": dict(candidate.mesh),
        "memory_bytes": candidate.memory,
        "seconds": candidate.time.seconds if candidate.time else None,
        "verdict": candidate.verdict,
    }


def _failure(planned: Plan, compiled: CompiledPlan | None, remedy: tuple[str, Plan] | None) -> str:
    if compiled and planned.fits:
        return f"{compiled.verdict}, where the closed form has {planned.need / GIB:.1f}: leave it more room"
    if remedy is None:
        return f"{planned.verdict}; no small change helps: try --search with more --gpus, or another --gpu"
    words, fitting = remedy
    return f"{planned.verdict}; smallest change that fits: {words} (a step takes {fitting.time.seconds:.3f} s)"


if __name__ == "__main__":
    sys.exit(main())
