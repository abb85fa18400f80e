"""Files that a run has made from others are made again, or refused, when those change.

There are some forty starts, of one step each or refused before it, which take a minute on two cores.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import tokenizers
import yaml

from megajax.config import DataConfig, InputError, TokenizerConfig, load_config
from megajax.config.load import load_run
from megajax.convert import main as convert
from megajax.corpus.prepare import own_tokenizer, prepare_text
from megajax.data.indexed import IndexedDataset, IndexedWriter
from megajax.data.tokenizers import build_tokenizer
from megajax.generate import main as generate
from megajax.train import main
from tests.made_runs import make_run
from tests.runs import ROOT, records
from tests.test_bad_input import the_error

pytestmark = pytest.mark.slow

SMALL = (
    "data.seq_length=8", "data.split=100", "evaluation.steps=0", "model.num_layers=1", "model.hidden_size=64",
    "model.num_heads=4", "model.max_positions=16", "train.steps=1", "train.global_batch_size=8", "log.peak_tflops=1",
    "log.tensorboard=false", "optim.decay_style=constant",
)  # fmt: skip
IDS = ("tokenizer.type=null", "tokenizer.vocab_size=31")
STOP = "train.attention=cudnn"
"""Refused when everything is prepared, and before anything is trained."""
Start = Callable[..., str]


def text(path: Path, words: str = "1 2 3 4 5 6 7 8 9 10 11 12") -> Path:
    path.write_text(f"{json.dumps({'text': words})}\n" * 8)
    return path


def tokens(run: Path, name: str = "0-a_text_document") -> list[int]:
    return [int(i) for i in IndexedDataset(run / "data" / name)[0]]


@pytest.fixture(autouse=True)
def workplace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    text(tmp_path / "a.jsonl")
    return tmp_path


@pytest.fixture
def start(capfd: pytest.CaptureFixture[str]) -> Start:
    """Start a training in this process: what it printed, or the line with which it was refused."""

    def start(*words: str, ids: bool = True) -> str:
        code = main([*SMALL, *(IDS if ids else ()), "output_dir=run", *words])
        out, err = capfd.readouterr()
        assert code in (0, 2), err
        return the_error(err) if code else out + err

    return start


def test_a_text_that_was_rewritten(start: Start, workplace: Path) -> None:
    """Nothing was trained on it, then something was."""
    assert STOP in start("data.text=a.jsonl", STOP)
    assert tokens(workplace / "run")[:3] == [1, 2, 3]
    text(workplace / "a.jsonl", "7 8 9 10 11 12 13 14 15 16")
    assert "finished 1 steps" in start("data.text=a.jsonl")
    assert tokens(workplace / "run")[:3] == [7, 8, 9]

    text(workplace / "a.jsonl", "9 9 9 9 9 9 9 9 9 9 9")
    line = start("data.text=a.jsonl", "train.steps=2")
    assert line.startswith("run/data/0-a_text_document: a.jsonl has changed, and run was trained on it: restore that")
    assert tokens(workplace / "run")[:3] == [7, 8, 9]
    text(workplace / "a.jsonl", "7 8 9 10 11 12 13 14 15 16").rename(workplace / "moved.jsonl")
    assert "resumed at step 1" in start("data.text=moved.jsonl", "train.steps=2")
    assert [path.name for path in workplace.glob("run/data/*.idx")] == ["0-a_text_document.idx"]
    text(workplace / "other.jsonl")
    line = start("data.text=other.jsonl", "train.steps=3")
    assert f"it was made from {workplace}/moved.jsonl, now other.jsonl is named, and run was trained on it" in line
    assert start("data.text=[moved.jsonl,other.jsonl]").startswith("run holds another run: its data.text is (")


def test_texts_are_counted_by_what_was_made_of_them(workplace: Path) -> None:
    """A first start of this version that was killed has left a record of one of the texts of an older run."""
    text(workplace / "b.jsonl")
    data, ids = DataConfig(text=("a.jsonl", "b.jsonl")), TokenizerConfig(type="null", vocab_size=31)
    made, _ = prepare_text(data, ids, workplace / "run")
    (workplace / "run/data/1.made_from.json").unlink()
    assert prepare_text(data, ids, workplace / "run", trained=True)[0] == made
    with pytest.raises(InputError, match=r"data.text stands for 1 files, and .*run was trained on 2: name those"):
        prepare_text(replace(data, text=("a.jsonl",)), ids, workplace / "run", trained=True)


def test_another_text_of_the_same_name(start: Start, workplace: Path) -> None:
    (workplace / "b").mkdir()
    text(workplace / "b/a.jsonl", "5 5 5 5 5 5 5 5 5 5")
    start("data.text=a.jsonl", STOP)
    start("data.text=b/a.jsonl", STOP)
    assert tokens(workplace / "run")[:3] == [5, 5, 5]
    assert "finished" in start("data.text=a.jsonl")
    line = start("data.text=b/a.jsonl", "train.steps=2")
    assert f"it was made from {workplace}/a.jsonl, now b/a.jsonl is named, and run was trained on it" in line


def word_level(path: Path, *words: str) -> Path:
    """A tokenizer.json with these words."""
    vocabulary = {word: number for number, word in enumerate(("<|endoftext|>", "?", *words))}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="?"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    path.parent.mkdir(exist_ok=True)
    tokenizer.save(str(path))
    return path


NUMBERS = [str(n) for n in range(1, 30)]
WORDS = ("tokenizer.type=huggingface", "tokenizer.model=tok.json", "data.text=a.jsonl")


def test_a_tokenizer_that_was_replaced(start: Start, workplace: Path) -> None:
    """Under the same name; what was made with it is made again, or all is refused."""
    word_level(workplace / "tok.json", *NUMBERS)
    start(*WORDS, STOP, ids=False)
    assert tokens(workplace / "run")[:3] == [2, 3, 4]
    word_level(workplace / "tok.json", *reversed(NUMBERS))
    assert "finished" in start(*WORDS, ids=False)
    assert tokens(workplace / "run")[:3] == [30, 29, 28]
    word_level(workplace / "tok.json", *NUMBERS)
    line = start(*WORDS, "train.steps=2", ids=False)
    assert line.startswith("the tokenizer in run/tokenizer: tok.json has changed, and run was trained on it: restore")


def test_the_special_tokens_beside_a_tokenizer_belong_to_it(start: Start, workplace: Path) -> None:
    word_level(workplace / "tok.json", *NUMBERS)
    start(*WORDS, STOP, ids=False)
    (workplace / "tokenizer_config.json").write_text('{"eos_token": "?"}')
    assert "finished" in start(*WORDS, ids=False)
    assert tokens(workplace / "run")[-1] == 1


def test_files_of_a_tokenizer_with_the_same_name(workplace: Path) -> None:
    """A template that is named counts in the run as well, and not the one that lies beside the tokenizer."""
    word_level(workplace / "theirs/tokenizer.json", *NUMBERS)
    word_level(workplace / "mine/tokenizer.json", *NUMBERS)
    for folder in ("theirs", "mine"):
        (workplace / folder / "chat_template.jinja").write_text(folder)
    config = TokenizerConfig(
        type="huggingface", model="theirs/tokenizer.json", chat_template="mine/chat_template.jinja"
    )
    own = own_tokenizer(config, workplace / "run")
    assert (own.model, own.chat_template) == (
        f"{workplace}/run/tokenizer/tokenizer.json", f"{workplace}/run/tokenizer/chat_template.jinja"
    )  # fmt: skip
    assert build_tokenizer(own).chat_template == build_tokenizer(config).chat_template == "mine"
    with pytest.raises(InputError, match=r"theirs/tokenizer.json and mine/tokenizer.json are files of one tokenizer"):
        own_tokenizer(replace(config, chat_template="mine/tokenizer.json"), workplace / "run")


def test_a_tokenizer_elsewhere_is_not_taken_for_the_one_that_came(workplace: Path) -> None:
    """As older versions left an imported run that was given another tokenizer.json: outside of it."""
    for name in ("run/huggingface", "other"):
        (workplace / name).mkdir(parents=True)
        word_level(workplace / name / "tokenizer.json", *NUMBERS)
    other = f"{workplace}/other/tokenizer.json"
    (workplace / "run/config.yaml").write_text(f"tokenizer: {{type: huggingface, model: {other}}}\n")
    assert load_run(workplace / "run").config.tokenizer.model == other
    (workplace / "other/tokenizer.json").unlink()
    assert load_run(workplace / "run").config.tokenizer.model == str(workplace / "run/huggingface/tokenizer.json")


OWN = ("tokenizer.type=sentencepiece", "tokenizer.vocab_size=290", "data.text=a.jsonl")


def test_a_tokenizer_trained_on_a_text_that_was_rewritten(start: Start, workplace: Path) -> None:
    text(workplace / "a.jsonl", "To be, or not to be, that is the question.")
    assert "a tokenizer of 290 pieces is trained on a.jsonl" in start(*OWN, ids=False)
    model = (workplace / "run/tokenizer/tokenizer.model").read_bytes()
    out = start(*OWN, "train.steps=2", ids=False)
    assert "resumed at step 1" in out and "pieces" not in out, "it is not trained again, and nobody says so"
    text(workplace / "a.jsonl", "Whether 'tis nobler in the mind to suffer the slings and arrows.")
    line = start(*OWN, "train.steps=3", ids=False)
    assert line.startswith("the tokenizer in run/tokenizer: a.jsonl has changed, and run was trained on it")
    assert (workplace / "run/tokenizer/tokenizer.model").read_bytes() == model


def test_a_refused_start_may_be_corrected(start: Start, workplace: Path) -> None:
    """Whatever it was that the first start got wrong."""
    text(workplace / "a.jsonl", "To be, or not to be, that is the question.")
    line = start(*OWN, "model.vocab_size=200", ids=False)
    assert line.startswith("model.vocab_size is 200 but the tokenizer has 290 ids")
    assert "finished" in start(*OWN, "model.vocab_size=400", "optim.lr=1e-3", ids=False)
    line = start(*OWN, "model.vocab_size=500", "optim.lr=1e-3", ids=False)
    assert line.startswith("run holds another run: its model.vocab_size is 400, now 500")


def test_a_run_that_moves(start: Start, workplace: Path, monkeypatch: pytest.MonkeyPatch, capfd) -> None:
    """From elsewhere, under another name, without tokenizer and text that it was made from."""
    word_level(workplace / "files/tok.json", *NUMBERS)
    (workplace / "files/tokenizer_config.json").write_text('{"eos_token": "?"}')
    words = ("tokenizer.type=huggingface", "tokenizer.model=files/tok.json", "data.text=a.jsonl")
    start(*words, ids=False)
    (workplace / "run").rename(workplace / "moved")
    shutil.rmtree(workplace / "files")
    (workplace / "a.jsonl").unlink()
    (workplace / "elsewhere").mkdir()
    monkeypatch.chdir(workplace / "elsewhere")

    assert generate(["../moved", "--prompt", "1 2", "--tokens", "2"]) == 0
    assert convert(["export", "../moved", "--out", "model"]) == 0
    assert {"tokenizer.json", "config.json"} <= {path.name for path in Path("model").iterdir()}
    assert main(["../moved/config.yaml", "train.steps=2"]) == 0
    assert main(["../moved/config.yaml", "train.steps=3", f"output_dir={workplace}/./moved"]) == 0
    out, _ = capfd.readouterr()
    assert "run: ../moved (resumed at step 1 of 2 steps)" in out and "moved (resumed at step 2 of 3" in out
    assert not Path("moved").exists() and not Path("runs").exists()
    assert len({(line["step"]) for line in records(workplace / "moved")}) == 3


def test_the_command_of_the_first_start_serves_from_elsewhere(
    start: Start, workplace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Absolute names of what relative ones meant, a link to the directory, a copy of the text."""
    start("data.text=a.jsonl")
    (workplace / "link").symlink_to(workplace / "run")
    (workplace / "elsewhere").mkdir()
    monkeypatch.chdir(workplace / "elsewhere")
    assert "resumed at step 1" in start(f"data.text={workplace}/a.jsonl", "train.steps=2", "output_dir=../link")
    shutil.copy(workplace / "a.jsonl", "a.jsonl")
    assert "resumed at step 2" in start("data.text=a.jsonl", "train.steps=3", "output_dir=../run")


def test_relative_names_from_another_folder(start: Start, workplace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Refused with both names and what to start instead, which goes on."""
    for name in ("c", "v"):
        with IndexedWriter(workplace / name, np.dtype(np.uint16)) as writer:
            for _ in range(8):
                writer.add_document([*range(12)])
    start("data.path=c")
    split = ("data.split=100,0,0", "data.train_path=c", "data.valid_path=v")
    start("init_from=run", *split, "output_dir=next")
    (workplace / "elsewhere").mkdir()
    monkeypatch.chdir(workplace / "elsewhere")
    here, run = Path.cwd(), "python -m megajax.train ../run/config.yaml"
    for value in ("data.path=c", "data.path=[1,c]", f"data.path=[1,{workplace}/v,1,c]"):
        error = start(value, "train.steps=2", "output_dir=../run")
        assert (
            f"data.path: c.idx is not in {here}, and ../run began with {workplace}/c: name that, or start {run}"
            in error
        )
    begin = (f"init_from={workplace}/run", "output_dir=../next")
    assert f"data.train_path: c.idx is not in {here}" in start(*begin, *split, "train.steps=2")
    error = start(*begin, split[0], f"data.train_path={workplace}/c", split[2])
    assert f"its data.valid_path is ('{workplace}/v',), now ('v',) in {here}; start python -m" in error
    error = start("init_from=run", "output_dir=../next", *split)
    assert f"from {here}; ../next began from {workplace}/run: name that, or start" in error
    for name in ("run", "next"):
        assert main([f"../{name}/config.yaml", "train.steps=2"]) == 0
        assert [line["step"] for line in records(workplace / name) if "lm loss" in line] == [1, 2]
    assert "resumed at step 2" in start(f"data.path={workplace}/v", "train.steps=3", "output_dir=../run")


def test_config_yaml_names_what_is_outside_absolutely_and_what_is_inside_from_there(
    start: Start, workplace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    start("data.text=a.jsonl", STOP, "checkpoint.directory=run/kept", "data.cache_dir=cache")
    written = yaml.safe_load((workplace / "run/config.yaml").read_text())
    assert written["data"]["text"] == [f"{workplace}/a.jsonl"]
    assert (written["checkpoint"]["directory"], written["data"]["cache_dir"]) == ("kept", f"{workplace}/cache")
    monkeypatch.chdir("/")
    config = load_config(workplace / "run/config.yaml").config
    assert (config.output_dir, config.checkpoint.directory) == (f"{workplace}/run", f"{workplace}/run/kept")


def test_a_run_of_an_older_version_is_adopted(start: Start, workplace: Path) -> None:
    """It has no identity, no records, and its tokenizer beside config.yaml; names are relative to where it was made."""
    text(workplace / "a.jsonl", "To be, or not to be, that is the question.")
    start(*OWN, ids=False)
    run = workplace / "run"
    (run / "tokenizer/tokenizer.model").rename(run / "tokenizer.model")
    shutil.rmtree(run / "tokenizer")
    for record in ("run.json", "data/0.made_from.json", "checkpoints/owner.json"):
        (run / record).unlink()
    config = (run / "config.yaml").read_text()
    assert "  window: 1000\n" in config, "of loss_scale"
    config = config.replace("  window: 1000\n", "  window: 500\n")  # which was accepted, and ignored in this precision
    (run / "config.yaml").write_text(config.replace(f"{workplace}/", ""))

    out = start(*OWN, "train.steps=2", ids=False)
    assert "resumed at step 1" in out
    assert "run is a run of an older version: from now on it has an identity" in out
    assert "run/data/0-a_text_document: taken as it is; from now on a.jsonl counts as what it was made from" in out
    assert f"{workplace}/a.jsonl" in (run / "config.yaml").read_text()
    text(workplace / "a.jsonl", "Something else.")
    assert "a.jsonl has changed, and run was trained on it" in start(*OWN, "train.steps=3", ids=False)


def test_a_run_that_trained_its_wordpieces(start: Start, workplace: Path, capfd) -> None:
    """Generation, export and another run find its vocabulary."""
    text(workplace / "a.jsonl", "to be or not to be that is the question whether tis nobler in the mind to suffer")
    words = ("tokenizer.type=bert_wordpiece", "tokenizer.vocab_size=80", "data.text=a.jsonl")
    assert "finished" in start(*words, ids=False)
    vocabulary = (workplace / "run/tokenizer/vocab.txt").read_bytes()
    assert generate(["run", "--prompt", "to be", "--tokens", "2"]) == 0
    assert convert(["export", "run", "--out", "model"]) == 0
    text(workplace / "b.jsonl", "completely different letters: xyzzy and other words")
    start("init_from=run", "data.text=b.jsonl", "output_dir=next", ids=False)
    assert (workplace / "next/tokenizer/vocab.txt").read_bytes() == vocabulary


def model_of(workplace: Path, name: str, scale: float) -> Path:
    """A Hugging Face model of the size of these runs, with words of its own."""
    shape = replace(load_config(None, SMALL).config.model, vocab_multiple=1)
    run = make_run(workplace / f"{name}-run", model=shape, vocab_size=32, scale=scale)
    assert convert(["export", str(run), "--out", str(workplace / name)]) == 0
    (workplace / name / "tokenizer_config.json").write_text('{"eos_token": "<|endoftext|>"}')
    word_level(workplace / name / "tokenizer.json", *NUMBERS)
    return workplace / name


TUNE = [word for word in SMALL if not word.startswith("model.")]


def test_weights_know_their_model(workplace: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Another model before the first step, and after it; then without any."""
    a, b = (model_of(workplace, name, scale) for name, scale in (("A", 0.1), ("B", 0.5)))
    capfd.readouterr()

    def tune(*words: str) -> str:
        code = main([*TUNE, "output_dir=run", *words])
        out, err = capfd.readouterr()
        assert code in (0, 2), err
        return the_error(err) if code else out + err

    with pytest.raises(SystemExit):
        main([*TUNE, "output_dir=run", f"init_from={a}", "data.text=a.jsonl", "--print-config"])
    out, _ = capfd.readouterr()
    assert "model.hidden_size: 64" in out and f"# init_from {a}" in out
    assert not Path("run").exists(), "nothing is imported to be looked at"
    assert tune(f"init_from={a}", "data.text=missing.jsonl").startswith("missing.jsonl: cannot be read")
    first = (workplace / "run/init_from.json").read_text()
    tune(f"init_from={b}", "data.text=a.jsonl", STOP)
    assert (workplace / "run/init_from.json").read_text() != first
    assert "finished" in tune(f"init_from={b}", "data.text=a.jsonl")
    line = tune(f"init_from={a}", "data.text=a.jsonl", "train.steps=2")
    assert line.startswith(f"run began from {b}, not from init_from {a} (it was made from {b}/")

    moved = b.rename(workplace / "C")
    assert "resumed at step 1" in tune(f"init_from={moved}", "data.text=a.jsonl", "train.steps=2")
    shutil.rmtree(moved)
    shutil.rmtree(workplace / "run/init_from")
    assert "resumed at step 2" in tune(f"init_from={moved}", "data.text=a.jsonl", "train.steps=3", "output_dir=./run/.")


def test_a_model_is_imported_behind_simulated_devices(workplace: Path) -> None:
    """They have to be set up before anything asks JAX for a device; a process of its own has none yet."""
    model = model_of(workplace, "A", 0.1)
    words = [*TUNE, "output_dir=run", f"init_from={model}", "data.text=a.jsonl", "parallel.simulate_devices=4"]
    code = f"import sys\nfrom megajax.train import main\nsys.exit(main({words!r}))"
    environment = {key: value for key, value in os.environ.items() if key != "XLA_FLAGS"} | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "mesh: data 4 (cpu)" in done.stdout and "weights of run/init_from, step 0" in done.stderr


def test_the_checkpoints_of_another_run(start: Start, workplace: Path) -> None:
    """They are neither resumed from nor deleted; the corrected command works, and so does a moved run."""
    start("data.text=a.jsonl", "output_dir=one", "checkpoint.directory=kept")
    line = start("data.text=a.jsonl", "output_dir=two", "checkpoint.directory=kept", "train.seed=7", "train.steps=9")
    assert line.startswith(f"{workplace}/kept holds the checkpoints of the run {workplace}/one, not of {workplace}/two")
    assert "finished" in start("data.text=a.jsonl", "output_dir=two", "train.seed=7")
    line = start("data.text=a.jsonl", "output_dir=three", "checkpoint.directory=two/checkpoints")
    assert f"holds the checkpoints of the run {workplace}/two, not of {workplace}/three" in line

    shutil.copytree(workplace / "one", workplace / "copy")
    words = ("data.text=a.jsonl", "checkpoint.directory=kept", "output_dir=copy")
    line = start(*words, "train.steps=2")
    assert f"the checkpoints of the run {workplace}/one, which {workplace}/copy is a copy of: go on with that" in line
    (workplace / "same").symlink_to(workplace / "one")
    assert "resumed at step 1 of 1" in start(*words[:2], "output_dir=same"), "the same run under another name"
    shutil.rmtree(workplace / "one")
    assert "resumed at step 1" in start(*words, "train.steps=2")
    shutil.rmtree(workplace / "copy")
    shutil.copytree(workplace / "two", workplace / "copy")
    assert generate(["copy", "--prompt", "1 2", "--tokens", "1"]) == 0
    assert "resumed at step 1" in start("data.text=a.jsonl", "output_dir=copy", "train.seed=7", "train.steps=2")
