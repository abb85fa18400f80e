"""Taking steps of a run again."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megajax import replay
from megajax.train import main
from tests.made_runs import make_run
from tests.runs import ALL_DEVICES, WORDS


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
    assert "steps 11 to 20: both passes, the run's metrics and its checkpoint agree in every bit" in out
    assert {path: path.read_bytes() for path in run.rglob("*") if path.is_file()} == before, "it only reads"


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
    assert "steps 11 to 13: both passes, the run's metrics DISAGREE" in out


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
