"""The whole job runs from its command line, with real files, real processes and real signals."""

from __future__ import annotations

import signal
import time
from pathlib import Path

import pytest

from megajax.config import load_config
from megajax.train import join_cluster, main, train
from tests.runs import ALL_DEVICES, WORDS, assert_same_run, finish, records, start

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def undisturbed(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """Twenty steps in one go, and what they printed."""
    output = tmp_path_factory.mktemp("runs") / "undisturbed"
    code, out, err = finish(start(corpus, output))
    assert code == 0, err
    return output, out


def test_a_run_says_what_it_does_and_learns(undisturbed: tuple[Path, str]) -> None:
    """Loud choices, Megatron's log line, and a loss that falls."""
    output, out = undisturbed
    choices = ("mesh: fsdp 2 x tensor 2", "attention: xla", "remat selective", "sources: share", "MFU = model FLOPs")
    for expected in choices:
        assert expected in out
    assert out.count("| lm loss: ") == 4
    validation = [line["lm loss validation"] for line in records(output) if "lm loss validation" in line]
    assert len(validation) == 3
    assert validation[-1] < validation[0] - 1
    assert "finished 20 steps" in out


def test_killed_after_a_save_and_resumed(corpus: Path, undisturbed: tuple[Path, str], tmp_path: Path) -> None:
    """10 steps, kill -9, 10 steps = 20 steps, to the bit."""
    kill = (
        "import os, signal\nfrom megajax.train import Trainer\nsave = Trainer.save\n"
        "def save_and_die(self):\n"
        "    save(self)\n    self.checkpoints.wait()\n    os.kill(os.getpid(), signal.SIGKILL)\n"
        "Trainer.save = save_and_die"
    )
    assert finish(start(corpus, tmp_path / "run", before=kill))[0] == -signal.SIGKILL
    code, out, err = finish(start(corpus, tmp_path / "run"))
    assert code == 0, err
    assert "resumed at step 10 of 20" in out
    assert_same_run(tmp_path / "run", undisturbed[0])


def test_a_start_that_hangs_ends(corpus: Path, tmp_path: Path):
    """The weights, from a file system or another process that does not answer, have ten times the time of a step."""
    stuck = "import time, megajax.train\nmegajax.train.in_turn = lambda state: time.sleep(100)"
    code, _, err = finish(start(corpus, tmp_path / "run", "cluster.hang_seconds=1", before=stuck))
    assert code == 4
    assert "no progress for 10 s after the start; the stacks of all threads:" in err


def test_sigterm_saves_and_leaves_politely(corpus: Path, undisturbed: tuple[Path, str], tmp_path: Path) -> None:
    """Exit code 0, the step it was at is saved, and resuming gives the undisturbed run."""
    output = tmp_path / "run"
    # The sleep only makes sure that the signal finds the run between two steps.
    slow = (
        "import time\nfrom megajax.train import Trainer\ndue = Trainer._due\n"
        "Trainer._due = lambda self, every: time.sleep(0.1) or due(self, every)"
    )
    process = start(corpus, output, before=slow)
    deadline = time.monotonic() + 240
    while time.monotonic() < deadline and not (output / "metrics.jsonl").exists():
        time.sleep(0.05)
    while time.monotonic() < deadline and len((output / "metrics.jsonl").read_text().splitlines()) < 4:
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    code, out, err = finish(process)
    assert code == 0, err
    assert "SIGTERM: step" in out
    assert finish(start(corpus, output))[0] == 0
    assert_same_run(output, undisturbed[0])


def test_a_finished_run_says_so(corpus: Path, undisturbed: tuple[Path, str], capfd: pytest.CaptureFixture[str]) -> None:
    """The same command again trains nothing; on other devices as well."""
    before = records(undisturbed[0])
    assert main([*WORDS, *ALL_DEVICES, f"data.text={corpus}", f"output_dir={undisturbed[0]}"]) == 0
    assert "has finished its 20 steps" in capfd.readouterr().out
    assert records(undisturbed[0]) == before


def test_diverging_training_stops(corpus: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """A loss that is no longer finite ends the run with exit code 3 and a line that says where."""
    words = [*WORDS, *ALL_DEVICES, f"data.text={corpus}", f"output_dir={tmp_path / 'run'}"]
    assert (
        main([*words, "optim.lr=1e30", "optim.warmup_steps=0", "optim.decay_style=constant", "optim.clip_grad=0"]) == 3
    )
    err = capfd.readouterr().err
    assert "megajax: stopped: the " in err
    assert "learning rate 1e+30; last good checkpoint: none was saved" in err
    assert "Traceback" not in err


def test_batch_size_ramp_and_samples(corpus: Path, tmp_path: Path) -> None:
    """8 -> 16 samples over the first 16, of 48 in all: steps of 8, 8, 16, 16, each a compiled size of its own."""
    words = [
        *WORDS,
        *ALL_DEVICES,
        f"data.text={corpus}",
        f"output_dir={tmp_path / 'run'}",
        "train.global_batch_size=16",
    ]
    length = ["train.steps=null", "train.samples=50", "train.rampup=[8,8,16]", "optim.warmup_steps=0"]
    result = train(load_config(None, [*words, *length]).config)
    steps = [line for line in records(tmp_path / "run") if "lm loss" in line]
    assert [line["batch-size"] for line in steps] == [8, 8, 16, 16]
    assert result.step == 4


def test_kubernetes_would_take_a_time_limit_for_the_end(monkeypatch, caplog):
    monkeypatch.setenv("JOB_COMPLETION_INDEX", "0")
    monkeypatch.setenv("JAX_NUM_PROCESSES", "1")
    config = load_config(None, ["train.exit_duration=60"]).config
    join_cluster(config)
    assert "train.exit_duration: Kubernetes takes that end for the end of the run" in caplog.text
    caplog.clear()
    join_cluster(load_config(None, []).config)
    assert not caplog.text
