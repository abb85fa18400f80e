"""Every mistake of the user gives exit code 2 and one line with the thing and the remedy; no traceback, and nothing
lost.

Most mistakes are made in this process through `main`, before anything is compiled; a full disk needs a process of its
own.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import jax
import numpy as np
import pytest

from megajax.data.indexed import IndexedWriter
from megajax.train import main

pytestmark = pytest.mark.slow

REPOSITORY = Path(__file__).resolve().parents[1]
SETTINGS = (
    "output_dir=run", "tokenizer.type=null", "tokenizer.vocab_size=31", "data.seq_length=8", "data.split=100",
    "model.num_layers=1", "model.hidden_size=64", "model.num_heads=4", "model.max_positions=16",
    "train.steps=1", "train.micro_batch_size=1", "train.global_batch_size=8",
    "parallel.simulate_devices=8", "log.peak_tflops=1", "log.tensorboard=false", "optim.decay_style=constant",
)  # fmt: skip
Refuse = Callable[..., str]


def documents(count: int = 8, text: str = "1 2 3 4 5 6 7 8 9 10 11 12") -> str:
    return f"{json.dumps({'text': text})}\n" * count


def the_error(stderr: str) -> str:
    """The one line about what went wrong."""
    (line,) = (line for line in stderr.splitlines() if line.startswith("megajax: error: "))
    assert "Traceback" not in stderr
    return line.removeprefix("megajax: error: ")


@pytest.fixture
def workplace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty working directory, but for a corpus of token ids below 31."""
    assert jax.device_count() == 8, "parallel.simulate_devices=8 is what the process has already"
    monkeypatch.chdir(tmp_path)
    (tmp_path / "corpus.jsonl").write_text(documents())
    return tmp_path


@pytest.fixture
def refuse(workplace: Path, capsys: pytest.CaptureFixture[str]) -> Refuse:
    """Start a training that must be refused; the line that says why."""

    def start(*words: str) -> str:
        assert main([*SETTINGS, *words]) == 2
        return the_error(capsys.readouterr().err)

    return start


@pytest.mark.parametrize(
    ("mistake", "named", "remedy"),
    [
        ("optim.learning_rate=1", "unknown key `optim.learning_rate`", "did you mean `optim.lr`?"),
        ("nowhere.yaml", "configuration file nowhere.yaml not found in", "configs"),
        ("model.num_heads=5", "model.hidden_size 64 is not a multiple of model.num_heads 5", "set model.head_dim"),
        ("parallel.tensor=8", "model.num_heads 4 is not a multiple of parallel.tensor 8", "that work: 1, 2, 4)"),
        ("parallel.data=3 train.global_batch_size=9", "data 3 x fsdp 1 x expert 1 x context 1 x tensor 1 = 3 devices",
         "change the parallel.* sizes"),
        ("parallel.simulate_devices=6", "already runs on 8 cpu device(s)", "restart the notebook kernel"),
        ("data.seq_length=32", "data.seq_length 32 exceeds model.max_positions 16", "lower the one or raise the other"),
        ("train.global_batch_size=12", "train.global_batch_size 12 is not a multiple of", "use 8 or 16"),
        ("model.vocab_size=16", "model.vocab_size is 16 but the tokenizer has 32 ids", "unset it, or raise it"),
        ("train.attention=cudnn", "train.attention=cudnn cannot run: the devices are cpus", "auto or xla"),
    ],
)  # fmt: skip
def test_configuration(refuse: Refuse, mistake: str, named: str, remedy: str):
    line = refuse("data.text=corpus.jsonl", *mistake.split())
    assert named in line
    assert remedy in line


@pytest.mark.parametrize(
    ("content", "line"),
    [
        ('{"text": "1"}\n\n{"text": "2"\n', "text.jsonl:3: not JSON"),
        ('{"text": "1"}\n[1, 2]\n', "text.jsonl:2: not a JSON record but a list"),
        ('{"text": "1"}\n{"body": "2"}\n', 'text.jsonl:2: no key "text" (the record has: body)'),
        ('{"text": "1 two 3"}\n', "text.jsonl:1: tokenizer.type null reads integers between spaces"),
        ('{"text": "1 31"}\n', "text.jsonl:1: token id 31 is not below tokenizer.vocab_size 31"),
        ("\n", "text.jsonl: no documents with text"),
        ("", "text.jsonl: no documents with text"),
    ],
)
def test_text(refuse: Refuse, workplace: Path, content: str, line: str):
    (workplace / "text.jsonl").write_text(content)
    assert refuse("data.text=text.jsonl").startswith(line)
    assert not list(workplace.glob("run/data/*")), "a half-written token file stayed behind"


def test_a_missing_text_file_can_be_corrected(refuse: Refuse, workplace: Path):
    assert refuse("data.text=corpsu.jsonl").startswith("corpsu.jsonl: cannot be read")
    assert refuse("data.text=corpus.jsonl", "train.attention=cudnn").startswith("train.attention"), "a new run by now"


@pytest.fixture
def tokens(workplace: Path) -> Path:
    """A token file: 8 documents of ids up to 12."""
    with IndexedWriter(workplace / "tokens", np.dtype(np.uint16)) as writer:
        for _ in range(8):
            writer.add_document(range(1, 13))
    return workplace / "tokens"


def shorten(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 3)


def overwrite_start(path: Path) -> None:
    path.write_bytes(b"PK" + path.read_bytes()[2:])


def overwrite_end(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-8] + bytes(8))


@pytest.mark.parametrize(
    ("suffix", "damage", "line"),
    [
        (".bin", shorten, "tokens.bin: shorter than the index says: 189 bytes found, 192 expected"),
        (".idx", shorten, "tokens.idx: 199 bytes found, 202 expected for 8 sequences and a document index of 9"),
        (".idx", overwrite_start, "tokens.idx: not a Megatron index (starts with b'PK"),
        (".idx", overwrite_end, "tokens.idx: the document index does not run from 0 to the 8 sequences"),
        (".idx", Path.unlink, "tokens.idx: no such file"),
    ],
)
def test_damaged_token_files(refuse: Refuse, tokens: Path, suffix: str, damage: Callable[[Path], object], line: str):
    damage(tokens.with_suffix(suffix))
    assert refuse("data.path=tokens").startswith(line)


def test_a_token_outside_the_vocabulary(refuse: Refuse, tokens: Path):
    line = refuse("data.path=tokens", "tokenizer.vocab_size=11")
    assert line.startswith("tokens.bin: token id 12 outside the vocabulary of 12")


def test_an_output_directory_with_other_files(refuse: Refuse, workplace: Path):
    (workplace / "run").mkdir()
    (workplace / "run/thesis.tex").write_text("precious")
    assert refuse("data.text=corpus.jsonl").startswith("run holds files but no run (no config.yaml)")
    assert [path.name for path in workplace.glob("run/*")] == ["thesis.tex"]


@pytest.mark.parametrize("path", ["corpus.jsonl", "corpus.jsonl/run"])
def test_an_output_directory_that_cannot_be(refuse: Refuse, path: str):
    assert refuse("data.text=corpus.jsonl", f"output_dir={path}").startswith(f"output_dir {path} cannot be written")


OWN_TOKENIZER = ("tokenizer.type=sentencepiece", "tokenizer.vocab_size=300", "data.text=corpus.jsonl")


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The working directory of a run that has taken its one step, with a tokenizer of its own."""
    directory = tmp_path_factory.mktemp("finished")
    text = "To be, or not to be, that is the question: whether 'tis nobler in the mind to suffer. "
    (directory / "corpus.jsonl").write_text(documents(text=text))
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(directory)
        assert main([*SETTINGS, *OWN_TOKENIZER]) == 0
    return directory


def contents(directory: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in sorted(directory.rglob("*")) if path.is_file()}


def test_the_output_directory_of_another_run(refuse: Refuse, finished: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(finished)
    before = contents(finished)
    line = refuse(*OWN_TOKENIZER, "model.num_layers=2")
    assert line.startswith("run holds another run: its model.num_layers is 1, now 2; choose another output_dir")
    assert contents(finished) == before


def test_a_run_whose_tokenizer_changed(refuse: Refuse, finished: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(finished)
    model = finished / "run/tokenizer/tokenizer.model"
    original = model.read_bytes()
    model.write_bytes(original + b"\x12\x02\x18\x00")  # one more protocol-buffer field: other bytes, still a model
    try:
        line = refuse(*OWN_TOKENIZER, "train.steps=2")
    finally:
        model.write_bytes(original)
    assert line.startswith(
        "run/data/0-corpus_text_document: its tokenizer is another one, and run was trained on it: restore"
    )


LIMITED = """
import resource, sys
resource.setrlimit(resource.RLIMIT_FSIZE, (16 * 1024, 16 * 1024))
from megajax.train import main
sys.exit(main(sys.argv[1:]))
"""


def test_a_full_disk_while_saving(finished: Path, monkeypatch: pytest.MonkeyPatch):
    """No file may grow beyond 16 KiB: the step goes well, its checkpoint does not, and the one before still serves."""
    words = [*SETTINGS, *OWN_TOKENIZER, "train.steps=3", "checkpoint.every=1"]
    command = [sys.executable, "-c", LIMITED, *words]
    environment = os.environ | {"PYTHONPATH": str(REPOSITORY)}
    full = subprocess.run(
        command, cwd=finished, env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert full.returncode == 2, full.stderr
    error = the_error(full.stderr)
    assert error.startswith(f"saving a checkpoint to {finished / 'run/checkpoints'} failed")
    assert "free space or change output_dir" in error
    assert finished_steps(finished) == {"1"}

    monkeypatch.chdir(finished)
    assert main(words) == 0
    assert finished_steps(finished) == {"2", "3"}


def finished_steps(directory: Path) -> set[str]:
    return {path.name for path in directory.glob("run/checkpoints/*") if path.name.isdigit()}
