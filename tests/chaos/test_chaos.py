"""One run meets one event of each kind; `python -m bench.chaos.chaos` has many events."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from bench.chaos.chaos import write_corpus
from bench.chaos.events import Fill, Kill, Moment, Raise, Terminate
from bench.chaos.jobs import Disk, Layout
from bench.chaos.run import Run

pytestmark = pytest.mark.slow

WORDS = ["train.steps=30", "checkpoint.every=3", "checkpoint.keep_last=3", "evaluation.every=5"]
SMALL = Layout(2, 1, ("parallel.fsdp=2", "parallel.tensor=1"))


def test_a_run_that_is_struck_comes_out_as_if_it_were_not(tmp_path: Path) -> None:
    """Kills, a full disk and errors in one run; every start resumes at the newest good checkpoint."""
    write_corpus(tmp_path)
    disk = Disk(tmp_path / "disk")
    try:
        undisturbed = Run("undisturbed", SMALL, tmp_path, disk, WORDS)
        expected = undisturbed.finish()
        run = Run("struck", SMALL, tmp_path, disk, WORDS)
        run.strike(Kill(Moment("write", 9, 0.02), "1"))
        run.damage(random.Random(0))
        run.strike(Raise(Moment("evaluation", 1, 0), 1))
        run.strike(Terminate(Moment("step", 3, 0.01), "launcher"))
        run.strike(Fill(Moment("step", 1, 0.01), None))
        run.finish(expected)
    finally:
        disk.close()
    outcomes = [*undisturbed.outcomes, *run.outcomes]
    assert not any(outcome.problems for outcome in outcomes), "\n".join(map(str, outcomes))
