"""Steps of a run are taken again."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from megajax import replay
from megajax.config import Config, InputError, OptimConfig, TrainConfig
from megajax.data.consumed import Mix, Reading
from megajax.train import main
from megajax.training.schedule import Schedule
from tests.made_runs import make_run
from tests.runs import ALL_DEVICES, WORDS, records

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def run(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Twenty steps, saved at 10 and 20."""
    output = tmp_path_factory.mktemp("replay") / "run"
    assert main([*WORDS, *ALL_DEVICES, f"data.text={corpus}", f"output_dir={output}"]) == 0
    return output


def test_the_same_bits_come_out_again(run: Path, capfd: pytest.CaptureFixture[str]) -> None:
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    assert replay.main([str(run)]) == 0
    out = capfd.readouterr().out
    assert "steps 11 to 20, 8 samples each: both passes, the run's metrics and its checkpoint agree in every bit" in out
    assert {path: path.read_bytes() for path in run.rglob("*") if path.is_file()} == before, "it only reads"


def test_steps_after_a_change_of_batch_size(run: Path, tmp_path: Path, corpus: Path) -> None:
    """Steps 11 to 20 had 16 samples, and the first start, whose values config.yaml keeps, 8."""
    copy = shutil.copytree(run, tmp_path / "copy")
    shutil.rmtree(copy / "checkpoints/20")
    words = [*WORDS, *ALL_DEVICES, f"data.text={corpus}", f"output_dir={copy}", "train.global_batch_size=16"]
    assert main(words) == 0
    assert [line["batch-size"] for line in records(copy) if "lm loss" in line] == [8] * 10 + [16] * 10
    assert replay.main([str(copy)]) == 0


def test_another_length_than_the_run_had_is_refused(run: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Which would give other learning rates: no fault of a device."""
    assert replay.main([str(run), "train.steps=40"]) == 2
    error = "the learning rate of step 20 decayed over 160 samples, and now over 320: give train.steps or train.samples"
    assert error in capfd.readouterr().err


def test_batch_sizes_are_those_recorded() -> None:
    """From a checkpoint at step 2; where a checkpoint is gone at which the size changed, or a ramp is another one."""

    def size(*sizes: int, **train: Any) -> int:
        recorded: dict[int, replay.Metrics] = {step: {"batch-size": float(n)} for step, n in enumerate(sizes, 3)}
        config = Config(train=TrainConfig(**{"steps": 9, "global_batch_size": 8} | train))
        return replay.with_recorded_batches(config, recorded, 16, 2, 5).train.global_batch_size

    assert (size(), size(8, 8, 8), size(4, 4), size(16, 16, 16)) == (8, 8, 4, 16)
    with pytest.raises(InputError) as caught:
        size(8, 8, 4)
    assert str(caught.value) == (
        "step 5 had 4 samples, where the run goes on with 8: choose a --step up to 4, as the checkpoint at which it "
        "changed is gone"
    )
    ramp = {"steps": None, "samples": 80, "rampup": (4, 4, 24)}
    assert size(4, 4, 8, **ramp) == 8
    with pytest.raises(InputError, match=r"step 5 had 4 samples.* give train\.rampup and train\.global_batch_size"):
        size(4, 4, 4, **ramp)
    with pytest.raises(InputError, match=r"step 5 had 8 samples, where the run goes on with 4"):
        size(4, 4, 8, **ramp | {"rampup": (4, 4, 40)})


def test_another_mix_than_the_run_read_is_refused() -> None:
    a, b = Reading("a", "A", 1.0), Reading("b", "B", 3.0)
    schedule = Schedule.from_config(OptimConfig(), 100, 4)
    record = {"step": 5, "data": Mix(8, (a, b)).to_record(), "decay": 100}
    replay.check_as_then(record, Mix(8, (Reading("moved", "A", 2.0), Reading("b", "B", 6.0))), schedule)
    for mix in (Mix(0, (a,)), Mix(0, (a, b)), Mix(8, (b, a))):
        with pytest.raises(InputError, match=r"another mix of sources at step 5.* was then, \[1\.0, a, 3\.0, b\]"):
            replay.check_as_then(record, mix, schedule)


def test_a_single_bit_is_found(run: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Step 13's loss as recorded, moved by one part in 2^52."""
    metrics = run / "metrics.jsonl"
    lines = [json.loads(line) for line in metrics.read_text().splitlines()]
    original = metrics.read_text()
    for line in lines:
        if line["step"] == 13:
            line["lm loss"] *= 1 + 2**-52
    try:
        metrics.write_text("".join(json.dumps(line) + "\n" for line in lines))
        assert replay.main([str(run), "--step", "13"]) == 1
    finally:
        metrics.write_text(original)
    out = capfd.readouterr().out
    assert "differs: step 13 lm loss: " in out
    assert "steps 11 to 13, 8 samples each: both passes, the run's metrics DISAGREE" in out


def test_there_has_to_be_a_checkpoint_before(run: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert replay.main([str(run), "--step", "10"]) == 2
    assert "has no checkpoint before step 10 (10, 20): choose a --step from 11 on" in capfd.readouterr().err
    assert replay.main([str(run / "nowhere")]) == 2
    assert "is not a run of megajax" in capfd.readouterr().err


def test_a_run_with_one_checkpoint(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """No step that does not exist is advised."""
    run = make_run(tmp_path / "run")
    assert replay.main([str(run)]) == 2
    error = "has no checkpoint before step 1 (1): nothing after step 1 is saved, so train on, or save more often"
    assert error in capfd.readouterr().err
