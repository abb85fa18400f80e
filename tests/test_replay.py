"""Taking steps of a run again."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megajax import replay
from megajax.train import main
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
    assert "has no checkpoint before step 10 (10, 20): choose another --step" in capfd.readouterr().err
    assert replay.main([str(run / "nowhere")]) == 2
    assert "is not a run of megajax" in capfd.readouterr().err
