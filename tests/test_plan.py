"""`python -m megajax.plan`: one layout, a search, and remedies for a plan that does not fit."""

import json
import re
from pathlib import Path

import pytest
from jsonschema import Draft202012Validator

from megajax.plan import main
from megajax.planning.schema import SCHEMA

GPT3_ON_128 = "models/gpt3_175b.yaml --gpu h100 --gpus 128 parallel.pipe=8 parallel.tensor=8 train.precision=bf16"


def read(path: Path) -> dict:
    answer = json.loads(path.read_text())
    Draft202012Validator(SCHEMA).validate(answer)
    return answer


def test_the_schema_is_one():
    Draft202012Validator.check_schema(SCHEMA)


def test_one_layout(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """GPT-3 in 16 nodes: 174.6 billion parameters, of which a device holds 1/64 in 4 bytes."""
    assert main([*GPT3_ON_128.split(), "--json", str(tmp_path / "plan.json"), "--tokens", "1e12"]) == 0
    shown, answer = capsys.readouterr().out, read(tmp_path / "plan.json")
    lines = shown.splitlines()
    assert lines[0] == "174,604,259,328 parameters in bf16 on 128 x H100"
    assert lines[1].startswith("pipe=8 data=2 tensor=8 sequence=on remat=selective microbatches=768")
    assert re.search(r"^fits: [\d.]+ GiB left of the 72.7 GiB that arrays can have \(H100\)$", shown, re.MULTILINE)
    assert answer["layout"]["mesh"] == {"pipe": 8, "data": 2, "fsdp": 1, "expert": 1, "context": 1, "tensor": 8}
    assert answer["memory"]["stages"]["first"]["weights"] == pytest.approx(4 * 174.604e9 / 64, rel=0.01)
    assert answer["step"]["seconds"] == pytest.approx(sum(answer["step"]["parts"].values()))
    assert answer["step"]["bubble_fraction"] == 7 / 768
    assert answer["budget"]["days"] == pytest.approx(1e12 / answer["step"]["tokens_per_second"] / 86_400)
    assert (answer["remedy"], answer["candidates"], answer["compiled"]) == (None, [], None)


def test_the_memory_that_the_user_gives_jax(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    """0.5 of 84.9e9 bytes are 39.5 GiB, too few for 67.5; Megatron-LM does not know of JAX's variable."""
    monkeypatch.setenv("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.5")
    assert main([*GPT3_ON_128.split(), "--json", str(tmp_path / "plan.json")]) == 3
    shown, answer = capsys.readouterr(), read(tmp_path / "plan.json")
    room = "39.5 GiB that arrays can have (H100, as XLA_PYTHON_CLIENT_MEM_FRACTION is 0.5)"
    assert room in shown.out and room in shown.err
    assert answer["memory"]["limit_bytes"] == pytest.approx(0.5 * 84.9e9)
    assert main([*GPT3_ON_128.split(), "--like", "megatron"]) == 0
    assert "72.7 GiB that arrays can have (H100)" in capsys.readouterr().out
    monkeypatch.setenv("XLA_PYTHON_CLIENT_MEM_FRACTION", "much")
    assert main(GPT3_ON_128.split()) == 2


def test_megatron_stages_differ(tmp_path: Path):
    """The first has the embedding and most in flight, the last the logits."""
    assert main([*GPT3_ON_128.split(), "--like", "megatron", "--json", str(tmp_path / "plan.json")]) == 0
    stages = read(tmp_path / "plan.json")["memory"]["stages"]
    assert stages["first"]["activations"] > stages["middle"]["activations"] > stages["last"]["activations"]
    assert (stages["first"]["logits"], stages["middle"]["logits"]) == (0, 0)
    assert stages["last"]["logits"] > 0


def test_a_search(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """The fastest is planned; each other one is told why it lost."""
    words = ["models/gpt3_1.3b.yaml", *"--gpus 8 --search --top 3 train.precision=bf16 --json".split()]
    assert main([*words, str(tmp_path / "plan.json"), "--html", str(tmp_path / "plan.html")]) == 0
    first, second, third = read(tmp_path / "plan.json")["candidates"]
    assert first["verdict"] == "fastest"
    assert first["seconds"] < second["seconds"] < third["seconds"]
    assert re.fullmatch(r"[\d.]+ % slower: [a-z ]+", third["verdict"])
    assert read(tmp_path / "plan.json")["layout"]["name"] == first["layout"]
    assert capsys.readouterr().out.splitlines()[1].startswith(first["layout"])
    assert (tmp_path / "plan.html").read_text().startswith("<!DOCTYPE html>")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["plan.html", "plan.json"]


def test_what_does_not_fit_is_told_what_would(capsys: pytest.CaptureFixture[str]):
    """Exit code 3; the words on stderr, added to the command line, make it fit."""
    words = "models/llama3_8b.yaml --gpus 8 parallel.fsdp=8 train.micro_batch_size=8 train.precision=bf16".split()
    words += ["train.global_batch_size=64"]
    assert main(words) == 3
    error = capsys.readouterr().err
    assert error.startswith("megajax: does not fit: ")
    change = re.search(r"smallest change that fits: (.*) \(a step takes [\d.]+ s\)\n", error)
    assert change[1] == "train.micro_batch_size=2"
    assert main([*words, *change[1].split()]) == 0


def test_logits_of_a_large_vocabulary(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """32 x 4096 x 128,256 fp32 numbers, and a gradient as large; NVIDIA-NeMo/Automodel#3907 ran into them."""
    words = "models/llama3_8b.yaml data.seq_length=4096 train.micro_batch_size=32 train.global_batch_size=32"
    assert main([*words.split(), "train.precision=fp32", "--json", str(tmp_path / "plan.json")]) == 3
    shown, answer = capsys.readouterr(), read(tmp_path / "plan.json")
    assert answer["memory"]["logits_bytes"] == 67_243_081_728
    assert not answer["memory"]["fits"]
    assert "67,243,081,728 bytes for a whole micro batch, and as many for their gradient, do not fit" in shown.out
    assert "without a chunked loss or a smaller train.micro_batch_size" in shown.out
    assert answer["remedy"] == "--gpus 4 parallel.data=1 train.micro_batch_size=1 parallel.fsdp=4"
    assert answer["remedy"] in shown.err


def test_nothing_near_fits(capsys: pytest.CaptureFixture[str]):
    """A trillion parameters, 16 bytes each: 64 times as many GPUs are still not enough."""
    assert main("models/megatron_1t.yaml --gpu a100-40gb --gpus 1".split()) == 3
    assert "no small change helps: try --search with more --gpus, or another --gpu" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--gpu v100", "unknown GPU 'v100': known are A100-40GB, A100-80GB, B200"),
        ("--gpu v100", "to add it, write a line into GPUS of megajax.costs.hardware"),
        ("--gpus 100 parallel.tensor=8", "number of devices 100 is not a multiple of"),
        ("--gpus 0", "0 GPUs cannot train: give 1 or more"),
        ("--gpus 7", "train.global_batch_size 512 is not a multiple of"),
        ("--search", "--search spreads the model over a number of GPUs: give --gpus N"),
        ("--search --gpus 8 --like megatron", "leave --like megatron out"),
        ("--trace trace.json", "--trace writes the profile of a compiled program: add --compile"),
        ("--compare a b --like megatron", "leave --like megatron out"),
        ("--compare a b --json plan.json", "--compare prints two profiles and nothing else: leave --json out"),
        ("--search --gpus 8 --top 0", "--gpus and --top count from 1"),
        ("--tokens many", "--tokens: invalid float value: 'many'"),
        ("--tokens -1", "tokens is -1: expected more than 0"),
        ("--json nowhere/plan.json", "cannot write nowhere/plan.json: No such file or directory"),
        ("--like megatron train.remat=[qkv]", "Megatron-LM cannot: choose none, selective or full"),
        ("model.vocab_size=null", "model.vocab_size is not known: set it, or give a tokenizer"),
        ("--gpus 128 parallel.fsdp=128 model.hidden_size=2112 model.num_heads=16", "model.hidden_size 2112 is not a"),
    ],
)
def test_bad_input(words: str, message: str, capsys: pytest.CaptureFixture[str]):
    assert main(["models/gpt3_1.3b.yaml", *words.split()]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert message in error
