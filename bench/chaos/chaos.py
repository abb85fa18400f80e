"""`python -m bench.chaos.chaos --events 50 --seed 0`: runs that are struck again and again end as if they were not.

Real jobs of one and two processes are killed, asked to leave, run out of disk, raise exceptions and find their newest
checkpoint damaged, at random moments. Each run goes on, start after start, until it is finished; then its last
checkpoint is compared byte by byte, and its metrics record by record, with those of an undisturbed run. The exit code
is 1 if anything was wrong. A seed stands for the same events; the moments depend on how fast the machine is, too.
"""

from __future__ import annotations

import argparse
import json
import logging
import random
import shutil
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from itertools import count
from pathlib import Path

import tests.conftest  # noqa: F401 - the environment of the tests
from bench.chaos.events import draw
from bench.chaos.jobs import ONE, TWO, Disk, Layout
from bench.chaos.run import Outcome, Result, Run

STEPS = 60
WORDS = [f"train.steps={STEPS}", "checkpoint.every=3", "checkpoint.keep_last=3", "evaluation.every=5"]
DECK = ["SIGKILL"] * 4 + ["SIGTERM", "disk full", "raise", "damage"] * 2


class Chaos:
    """Runs, and what happens to them."""

    def __init__(self, seed: int, scratch: Path, disk: Disk) -> None:
        self._rng, self._scratch, self._disk = random.Random(seed), scratch, disk
        self._deck: list[str] = []
        self._references: dict[Layout, tuple[Result, float]] = {}
        write_corpus(scratch)

    def runs(self, events: int) -> Iterator[Outcome]:
        """Run after run until so many events have happened; what came of each."""
        for number in count(1):
            if not events:
                return
            layout = self._rng.choice([ONE, TWO, TWO, TWO])
            if layout not in self._references:
                yield from self._undisturbed(layout)
            run = Run(f"run-{number}", layout, self._scratch, self._disk, WORDS)
            here = min(events, self._rng.randint(4, 7))
            yield from self._disturbed(run, here)
            events -= here

    def _undisturbed(self, layout: Layout) -> Iterator[Outcome]:
        """Two such runs, which have to be equal: one that compiles, and one that takes as long as those to come."""
        names = [f"undisturbed-{layout.processes}-{number}" for number in (1, 2)]
        first, second = (Run(name, layout, self._scratch, self._disk, WORDS) for name in names)
        result = first.finish()
        second.finish(result)
        self._references[layout] = result, second.start_seconds
        yield from [*first.outcomes, *second.outcomes]

    def _disturbed(self, run: Run, events: int) -> Iterator[Outcome]:
        """Strike a run so many times, evenly spread over its steps, and let it finish."""
        expected, start_seconds = self._references[run.layout]
        told = 0
        for left in range(events, 0, -1):
            kind = self._draw(damage=len(run.steps) > 2 and not run.damaged)
            if kind == "damage":
                run.damage(self._rng)
                continue
            span = max((STEPS - run.steps[-1]) // (left + 1), 1)
            run.strike(draw(kind, self._rng, run.layout, span, start_seconds, late=run.damaged))
            yield from run.outcomes[told:-1]
            told = len(run.outcomes) - 1
        run.finish(expected)
        yield from run.outcomes[told:]

    def _draw(self, damage: bool) -> str:
        """The next kind of event; one that is not possible now waits for its turn."""
        if not any(damage or kind != "damage" for kind in self._deck):
            self._deck = self._rng.sample(DECK, len(DECK)) + self._deck
        return self._deck.pop(next(i for i, kind in enumerate(self._deck) if damage or kind != "damage"))


def write_corpus(scratch: Path) -> None:
    """Forty documents of counting numbers."""
    texts = [" ".join(str((7 * document + i) % 50) for i in range(90)) for document in range(40)]
    (scratch / "numbers.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))


def table(outcomes: list[Outcome]) -> str:
    """How often what happened, and how it went."""
    kinds = defaultdict[str, list[Outcome]](list)
    for outcome in outcomes:
        kinds[outcome.kind].append(outcome)
    lines = [f"{'':14} {'times':>5}  {'slowest':>7}  {'wrong':>5}  exit codes; moments"]
    for kind, group in kinds.items():
        slowest = max((outcome.seconds or 0 for outcome in group), default=0)
        wrong = sum(bool(outcome.problems) for outcome in group)
        codes = counted(outcome.code for outcome in group)
        moments = counted(outcome.when.partition(" +")[0] for outcome in group)
        lines.append(f"{kind:14} {len(group):5}  {slowest:5.1f} s  {wrong:5}  {codes}; {moments}")
    return "\n".join(lines)


def counted(values: Iterable[object]) -> str:
    """How often each of them occurs, in words."""
    return ", ".join(f"{times} x {value}" for value, times in Counter(values).items())


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m bench.chaos.chaos", description=__doc__)
    parser.add_argument("--events", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    logging.getLogger("absl").setLevel(logging.ERROR)  # Orbax misses a file that nobody needs
    scratch = Path(tempfile.mkdtemp(prefix="chaos-"))
    disk, outcomes, begin = Disk(scratch / "disk"), list[Outcome](), time.monotonic()
    try:
        for outcome in Chaos(options.seed, scratch, disk).runs(options.events):
            print(f"{time.monotonic() - begin:5.0f} s  {outcome}", flush=True)
            outcomes.append(outcome)
    finally:
        disk.close()
    print(f"\n{table(outcomes)}")
    if wrong := any(outcome.problems for outcome in outcomes):
        print(f"logs are in {scratch}")
    else:
        shutil.rmtree(scratch)
    return int(wrong)


if __name__ == "__main__":
    sys.exit(main())
