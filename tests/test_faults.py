"""Bad steps, signals and second starts happen to whole runs in this process."""

from __future__ import annotations

import json
import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from megajax.checkpoint.store import Checkpoints
from megajax.config import load_config
from megajax.train import Trainer, main, train
from megajax.training.run_directory import RunDirectory
from tests.runs import ALL_DEVICES, WORDS, arrays, records

pytestmark = pytest.mark.slow

Words = Callable[..., list[str]]


@pytest.fixture
def words(corpus: Path, tmp_path: Path) -> Words:
    """The words of a run of twenty steps on the devices of this process, in `tmp_path / "run"`."""
    return lambda *more: [*WORDS, *ALL_DEVICES, f"data.text={corpus}", f"output_dir={tmp_path / 'run'}", *more]


def spoil(monkeypatch: pytest.MonkeyPatch, *steps: int, how: Callable[[dict[str, np.ndarray]], None]) -> list[int]:
    """Damage the batch of some steps; the steps that were taken, as they were."""
    take_step, taken = Trainer.take_step, []

    def take(self: Trainer, consumed: int, batch: dict[str, np.ndarray]) -> Any:
        taken.append(self.step + 1)
        if self.step + 1 in steps:
            how(batch)
        return take_step(self, consumed, batch)

    monkeypatch.setattr(Trainer, "take_step", take)
    return taken


def not_a_number(batch: dict[str, np.ndarray]) -> None:
    batch["loss_mask"][0, 0] = np.nan


def other_words(batch: dict[str, np.ndarray]) -> None:
    """What the model has learned to be unlikely."""
    batch["labels"] = (batch["labels"] + 25) % 50


def steps_of(output: Path) -> list[Any]:
    return [line["step"] for line in records(output) if "lm loss" in line]


def test_a_bad_batch_can_be_skipped(
    words: Words, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """One batch gives nan, a later one a spike; the run goes on, and says so."""
    spoil(monkeypatch, 7, how=not_a_number)
    spoil(monkeypatch, 18, how=other_words)
    result = train(load_config(None, words("health.policy=skip", "health.spike_factor=1.3", "health.window=5")).config)
    assert result.step == 20
    assert "the loss is nan at step 7" in caplog.text
    assert "the loss jumped to" in caplog.text
    assert [line["step"] for line in records(tmp_path / "run") if line.get("skipped")] == [7, 18]


def test_a_run_goes_back_from_a_bad_step_and_past_its_data(
    words: Words, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bad at 15, saved at 10: steps 16 to 20 follow on the weights of step 10. The reference takes just those."""
    with monkeypatch.context() as patch:
        taken = spoil(patch, 15, how=not_a_number)
        train(load_config(None, words("health.policy=rollback", "checkpoint.keep_last=3")).config)
    assert taken == [*range(1, 17), *range(16, 21)]  # step 16 was on its way when the news of 15 came
    assert steps_of(tmp_path / "run") == [*range(1, 11), *range(16, 21)]

    _, config = RunDirectory.open(tmp_path / "run")
    monkeypatch.setattr(Trainer, "train", lambda self, requests: self)
    (tmp_path / "run/checkpoints/20").rename(tmp_path / "finished")
    trainer: Any = train(config)
    assert trainer.step == 10
    trainer.step, trainer.consumed = 15, 15 * 8
    trainer.state = trainer.state._replace(step=jnp.int32(15))
    for consumed, batch in trainer.batches():
        trainer.take_step(consumed, batch)
    with Checkpoints(tmp_path / "again/checkpoints", config.checkpoint) as checkpoints:
        checkpoints.save(20, trainer.canonical.of(trainer.state), trainer.record())
    (tmp_path / "finished").rename(tmp_path / "run/checkpoints/20")
    expected = arrays(tmp_path / "again", 20)
    for name, value in arrays(tmp_path / "run", 20).items():
        assert value.tobytes() == expected[name].tobytes(), name


def test_a_run_does_not_go_back_for_ever(
    words: Words, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Everything from step 12 on is bad."""
    spoil(monkeypatch, *range(12, 21), how=not_a_number)
    assert main(words("health.policy=rollback", "health.patience=2")) == 3
    assert "megajax: stopped: the loss is nan at step 14" in (err := capfd.readouterr().err)
    assert "went back to step 10 2 times and came no further" in err


def test_returns_count_over_a_crash(
    words: Words, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Everything from step 12 on is bad, and after one of two returns the machine fails.

    The next start has one return left, and gives up at the second bad step; the one after that has both again.
    """
    seen: list[int] = []

    def fail_once(batch: dict[str, np.ndarray]) -> None:
        seen.append(len(seen))
        if len(seen) == 3:  # 12 was bad, 13 on its way, and this is 13 after the return
            raise RuntimeError("the machine fails")
        not_a_number(batch)

    spoil(monkeypatch, *range(12, 21), how=fail_once)
    said, file = words("health.policy=rollback", "health.patience=2"), tmp_path / "run/returns.json"
    with pytest.raises(RuntimeError, match="the machine fails"):
        main(said)
    assert json.loads(file.read_text()) == {"10": 1}
    for last in (13, 14):
        assert main(said) == 3
        err = capfd.readouterr().err
        assert f"megajax: stopped: the loss is nan at step {last}" in err
        assert "went back to step 10 2 times and came no further" in err
        assert not file.exists()

    file.write_text("[")
    assert main(said) == 2
    assert f"{file} is damaged: delete it, and returns count from this start on" in capfd.readouterr().err


@pytest.mark.parametrize(("number", "saved"), [(signal.SIGTERM, [3]), (signal.SIGUSR1, [3, 10, 20])])
def test_signals_during_a_step(
    words: Words, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: signal.Signals, saved: list[int]
) -> None:
    """SIGTERM saves the step and leaves, SIGUSR1 saves it and goes on."""
    spoil(monkeypatch, 3, how=lambda _: os.kill(os.getpid(), number))
    result = train(load_config(None, words("checkpoint.keep_last=5")).config)
    assert result.step == saved[-1]
    assert sorted(int(path.name) for path in (tmp_path / "run/checkpoints").glob("[0-9]*")) == saved


def test_a_signal_ends_an_evaluation(
    words: Words, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """After the batch that is being evaluated, not after all of them."""
    interrupted, batches = Trainer._interrupted, []

    def note(self: Trainer) -> bool:
        batches.append(self.step)
        if len(batches) == 3:  # the second evaluation's first batch
            os.kill(os.getpid(), signal.SIGTERM)
        return interrupted(self)

    monkeypatch.setattr(Trainer, "_interrupted", note)
    assert train(load_config(None, words("evaluation.every=5")).config).step == 5
    assert batches == [0, 0, 5]
    assert "SIGTERM: step 5 of 20 is saved" in capfd.readouterr().out


def test_a_time_limit(words: Words, capfd: pytest.CaptureFixture[str]) -> None:
    """Over before the first step ends: it is saved all the same."""
    assert main(words("train.exit_duration=0.001", "evaluation.every=null")) == 0
    assert "train.exit_duration: step 1 of 20 is saved; the same command resumes" in capfd.readouterr().out


def test_two_starts_in_one_directory(
    words: Words, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """While one trains, another is refused."""
    running, done = threading.Event(), threading.Event()
    run = RunDirectory(tmp_path / "run")
    run.path.mkdir()

    def hold() -> None:
        with run.locked(first=True):
            running.set()
            done.wait(60)

    holder = threading.Thread(target=hold)
    holder.start()
    try:
        assert running.wait(60)
        assert main(words()) == 5
        assert f"another process is training into {tmp_path / 'run'}" in capfd.readouterr().err
    finally:
        done.set()
        holder.join()


def test_the_step_is_compiled_once(words: Words, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ten samples an epoch in batches of four: batches go on into the next epoch, none is short."""
    corpus = tmp_path / "ten.jsonl"
    corpus.write_text('{"text": "1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16"}\n' * 10)
    finish, trainers = Trainer.train, []
    monkeypatch.setattr(Trainer, "train", lambda self, requests: trainers.append(self) or finish(self, requests))
    settings = ["data.split=100,0,0", "train.global_batch_size=4", "train.steps=5", "train.micro_batch_size=1"]
    train(load_config(None, words(f"data.text={corpus}", *settings)).config)
    assert len(trainers[0].dataset) >= 20
    assert trainers[0].train_step.sizes == 1
