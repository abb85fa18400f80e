"""`python -m megajax.evaluate` takes its command line, and gives the same numbers on every layout."""

import json
import logging
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from megajax.evaluate import main
from tests.made_runs import MODEL, make_run


@pytest.fixture(autouse=True)
def loggers_stay_as_they_are() -> Iterator[None]:
    """The command line sets up the root logger of its process, which here is that of all tests."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("evaluate")
    (directory / "wiki").write_text(" ".join(str(n % 250) for n in range(100)))
    lines = [json.dumps({"text": " ".join(str(n) for n in range(n, n + 9))}) for n in range(5)]
    (directory / "documents").write_text("\n".join(lines))
    return make_run(directory / "run")


def result(run: Path, capsys: pytest.CaptureFixture[str], *words: str, data: str = "documents") -> dict[str, float]:
    assert main([str(run), "--data", str(run.parent / data), "--json", *words]) == 0
    captured = capsys.readouterr()
    assert len(captured.out.splitlines()) == 1
    return json.loads(captured.out)


@pytest.mark.parametrize(
    ("task", "data", "names"),
    [
        ("wikitext103", "wiki", {"loss", "perplexity", "adjusted_perplexity", "token_ratio", "tokens"}),
        ("lambada", "documents", {"correct", "examples", "accuracy"}),
        ("jsonl-perplexity", "documents", {"loss", "perplexity", "bits_per_byte", "tokens", "documents"}),
    ],
)
def test_the_same_numbers_on_every_layout(
    run: Path, capsys: pytest.CaptureFixture[str], task: str, data: str, names: set[str]
):
    one = result(run, capsys, "--task", task, data=data)
    assert one.keys() == names
    for layout in (["parallel.tensor=2", "parallel.data=2"], ["parallel.fsdp=8"]):
        assert result(run, capsys, *layout, "--task", task, data=data) == pytest.approx(one, rel=1e-5)


def test_a_line_for_people(run: Path, capsys: pytest.CaptureFixture[str]):
    assert main([str(run), "--task", "wikitext103", "--data", str(run.parent / "wiki"), "--overlapping-eval", "8"]) == 0
    assert capsys.readouterr().out.startswith("validation results on WIKITEXT103 | avg loss: ")


def test_another_length(run: Path, capsys: pytest.CaptureFixture[str]):
    """Windows are as long as the samples of the training, unless said otherwise."""
    a = result(run, capsys, "--task", "wikitext103", data="wiki")
    b = result(run, capsys, "--task", "wikitext103", "data.seq_length=32", data="wiki")
    assert (a["tokens"], a["loss"]) != (b["tokens"], b["loss"])


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--task", "wikitext103", "--overlapping-eval", "17"], "--overlapping-eval is 17: expected 1 to 16"),
        (["--task", "lambada", "--overlapping-eval", "4"], "not with --task lambada"),
        (["--task", "wikitext103", "--strict-lambada"], "--strict-lambada goes with --task lambada"),
        (["--task", "squad"], "invalid choice: 'squad'"),
        (["--task", "lambada", "--batch-size", "0"], "batch size is 0"),
        (["--task", "lambada", "optim.lr=1"], "optim.lr=1: settled by the training"),
        (["--task", "lambada", "parallel.pipe=2"], "parallel.pipe is for training"),
        (["--task", "lambada", "parallel.zero=1"], "parallel.zero is for training"),
        (["--task", "lambada", "parallel.tensor=16"], "but there are 8"),
        (["--task", "lambada", "parallel.tensor=8"], "not divisible by tensor = 8"),
        (["--task", "wikitext103", "data.seq_length=64"], "data.seq_length is 64: the model sees 32"),
    ],
)
def test_bad_input(run: Path, words: list[str], message: str, capsys: pytest.CaptureFixture[str]):
    assert main([str(run), "--data", str(run.parent / "documents"), *words]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert message in captured.err.splitlines()[-1]


def test_models_that_do_not_predict_the_next_token(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """In one line, before anything is read."""
    bert = make_run(tmp_path / "run", model=replace(MODEL, family="bert"))
    assert main([str(bert), "--task", "lambada", "--data", "x"]) == 2
    assert f"--task lambada takes a gpt model, and that of {bert} is a bert" in capsys.readouterr().err
