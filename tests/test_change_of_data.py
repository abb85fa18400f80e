"""A run is started again with other sources, weights, batch size and devices."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest

from megajax.checkpoint.store import Checkpoints
from megajax.data.indexed import IndexedWriter
from megajax.train import main
from tests.runs import ALL_DEVICES, WORDS

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two token files of 90 and 10 % of 200 documents of 40 tokens."""
    folder, rng = tmp_path_factory.mktemp("sources"), np.random.default_rng(0)
    for name in ("a", "b"):
        with IndexedWriter(folder / name, np.dtype(np.uint16)) as writer:
            for tokens in rng.integers(0, 50, (200, 40)):
                writer.add_document(tokens)
    return folder


def consumed(output: Path, step: int) -> dict[str, int]:
    """Samples of every source that a checkpoint accounts for."""
    with Checkpoints(output / "checkpoints", None) as checkpoints:
        data = checkpoints.record(step)["data"]
    return {Path(source["prefix"]).name: source["consumed"] for source in (*data["sources"], *data["left_out"])}


def test_every_source_goes_on_where_it_was(sources: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    a, b, output = sources / "a", sources / "b", tmp_path / "run"
    words = [*WORDS, *ALL_DEVICES, f"output_dir={output}", "evaluation.steps=0", "evaluation.every=null"]
    assert main([*words, f"data.path={a}", "train.steps=10"]) == 0
    assert consumed(output, 10) == {"a": 80}
    assert "100.0%         0    0.00          80    0.18  " in capfd.readouterr().out

    mixed = [f"data.path=[1,{a},3,{b}]", "train.global_batch_size=16", "train.micro_batch_size=4"]
    assert main([*words, *mixed, "train.steps=15"]) == 0
    out = capfd.readouterr().out
    assert consumed(output, 15) == {"a": 100, "b": 60}
    assert "goes on at sample 80, none is left out or comes twice" in out
    assert (
        "global batch: 16 samples instead of 8, from step 11 on; the learning rate goes on by steps as planned" in out
    )
    assert "(another mix from sample 80 on)" in out

    assert main([*words, f"data.path={b}", "train.steps=20", "parallel.data=1", "parallel.tensor=4"]) == 0
    assert consumed(output, 20) == {"a": 100, "b": 100}
    assert f"100  left out: {a}" in capfd.readouterr().out


def test_other_documents_under_an_old_name(sources: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    words = [
        *WORDS,
        *ALL_DEVICES,
        f"output_dir={tmp_path / 'run'}",
        f"data.path={tmp_path / 'c'}",
        "evaluation.steps=0",
    ]
    for documents, code in ((100, 0), (80, 2)):
        with IndexedWriter(tmp_path / "c", np.dtype(np.uint16)) as writer:
            for start in range(documents):
                writer.add_document([(start + i) % 50 for i in range(40)])
        assert main([*words, "train.steps=4", "evaluation.every=null"]) == code
    assert f"{tmp_path / 'c'} holds other documents than at the run's checkpoint" in capfd.readouterr().err


def test_another_batch_size_keeps_the_curve(corpus: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Cosine with a warm-up of 8 of 12 steps; after 6 steps twice the batch. As the metrics have it."""
    words = [
        *WORDS, *ALL_DEVICES, f"output_dir={tmp_path}", f"data.text={corpus}", "evaluation.every=null",
        "evaluation.steps=0", "model.num_layers=1", "optim.warmup_steps=8", "optim.decay_steps=12",
        "optim.decay_style=cosine",
    ]  # fmt: skip
    assert main([*words, "train.steps=6"]) == 0
    assert main([*words, "train.steps=12", "train.global_batch_size=16"]) == 0
    assert "the learning rate goes on by steps as planned" in capfd.readouterr().out
    lines = (json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines())
    rates = [line["learning-rate"] for line in lines if "learning-rate" in line]
    cosine = [0.01 * 0.5 * (1 + math.cos(math.pi * i / 4)) for i in range(4)]
    np.testing.assert_allclose(rates, [*(0.01 * step / 8 for step in range(8)), *cosine], rtol=1e-5, atol=1e-9)
