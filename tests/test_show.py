"""`python -m megajax.show` prints what a device would hold, without a device."""

import math
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import jax
import numpy as np
import pytest

from megajax.config import Config, InputError, ModelConfig, ParallelConfig, TokenizerConfig, load_config, resolve_mesh
from megajax.models.parameters import named_leaves
from megajax.parallel.mesh import build_mesh
from megajax.parallel.rules import Rules
from megajax.show import main, schedule_of, sharding_of
from megajax.training.step import build_init

ROOT = Path(__file__).parents[1]
LAYOUT = ["parallel.fsdp=16", "parallel.tensor=8"]
TINY = Config(model=ModelConfig(num_layers=2, hidden_size=64, num_heads=8, max_positions=32, vocab_size=100))


def test_parameter_of_gpt3_175b():
    """96 layers of a 12288 x (96 x 3 x 128) matrix, columns over tensor 8, rows over fsdp 16."""
    config = load_config("models/gpt3_175b.yaml", LAYOUT).config
    qkv = next(p for p in sharding_of(config, 128).parameters if p.name == "blocks.attention.qkv")
    assert qkv.shape == (96, 12288, 96, 3, 128)
    assert [rule.logical for rule in qkv.rules] == ["layers", "embed", "kv_heads", "qkv_in_group", "head_dim"]
    assert [rule.at_rest for rule in qkv.rules] == [("pipe",), ("fsdp",), ("tensor",), (), ()]
    assert qkv.shard == (96, 768, 12, 3, 128)
    assert qkv.shard_bytes == 4 * 96 * 768 * 12 * 3 * 128


@pytest.mark.parametrize("name", ["adamw", "lion"])
def test_agrees_with_the_arrays_of_a_run(name: str):
    parallel = ParallelConfig(data=2, fsdp=2, tensor=2)
    config = replace(TINY, parallel=parallel, optim=replace(TINY.optim, name=name))
    told = sharding_of(config)
    _, like, shardings = build_init(config, Rules(build_mesh(resolve_mesh(parallel, 8))))
    state = jax.tree.map(lambda leaf, at: jax.device_put(np.zeros(leaf.shape, leaf.dtype), at), like, shardings)

    def held(tree: object) -> int:
        return sum(leaf.addressable_shards[0].data.nbytes for leaf in jax.tree.leaves(tree))

    shards = {name: leaf[...].addressable_shards[0].data.shape for name, leaf in named_leaves(state.params)}
    assert shards == {p.name: p.shard for p in told.parameters}
    assert (told.weights, told.gradients, told.optimizer) == (
        held(state.params), held(state.params), held(state.opt_state)
    )  # fmt: skip


def test_devices():
    config = replace(TINY, parallel=ParallelConfig(fsdp=2, tensor=4))
    assert sharding_of(config).mesh["data"] == 1
    assert sharding_of(config, 32).mesh["data"] == 4
    simulated = replace(config, parallel=replace(config.parallel, simulate_devices=16))
    assert sharding_of(simulated).mesh["data"] == 2


def test_vocabulary_of_a_tokenizer_that_is_not_trained_yet():
    """28 is padded to 128 rows; the padding is no parameter."""
    tokenizer = TokenizerConfig(type="sentencepiece", vocab_size=28)
    config = replace(TINY, model=replace(TINY.model, vocab_size=None), tokenizer=tokenizer)
    told = sharding_of(config)
    padded = sum(math.prod(p.shape) for p in told.parameters)
    assert padded - told.model_size == (128 - 28) * 64


@pytest.mark.slow
def test_command_needs_no_device():
    """3,072 of them on a machine whose only platform does not exist; nothing is broken over two lines."""
    command = [sys.executable, *"-m megajax.show models/gpt3_175b.yaml --devices 3072".split(), *LAYOUT]
    environment = os.environ | {"JAX_PLATFORMS": "tpu"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=True)
    assert done.stderr == ""
    lines = done.stdout.splitlines()
    assert lines[0].startswith("174,604,259,328 parameters on 3,072 device(s): pipe 1 x data 24 x fsdp 16 x")
    columns = ["blocks.mlp.fc2", "96, 49152, 12288", "layers, mlp, embed", "pipe 1, tensor 8, fsdp 16", "96, 6144, 768"]
    assert [*columns, "1,728.000"] in [[cell.strip() for cell in line.split("  ") if cell] for line in lines]
    assert any(line.startswith("embed ") and "ZeRO-3 (1910.02054)" in line for line in lines)
    assert lines[-1].startswith("together ")
    assert "\x1b" not in done.stdout


def test_pipeline_holds_its_chunks_and_its_part_of_the_vocabulary():
    """4 layers on 2 stages in 2 chunks: one layer of each. 4096 vocabulary rows over 2 stages x 2 tensor shards."""
    words = ["parallel.pipe=2", "parallel.chunks=2", "parallel.tensor=2", "train.micro_batch_size=1"]
    config = load_config("quickstart.yaml", words).config
    shards = {p.name: (p.shape, p.shard) for p in sharding_of(config).parameters}
    assert shards["blocks.mlp.fc2"] == ((2, 2, 512, 128), (2, 1, 256, 128))
    assert shards["word_embedding"] == ((4096, 128), (1024, 128))


def test_zero_splits_what_lies_at_rest_over_replicas():
    """ZeRO-1 (1910.02054): of 4 replicas each holds a quarter of all matrices and moments, but sums whole gradients."""
    shared, split = (sharding_of(replace(TINY, parallel=ParallelConfig(data=4, zero=zero))) for zero in (0, 1))
    quarter = {p.name: (*p.shape[:-1], p.shape[-1] // 4) for p in shared.parameters if p.rules[-1].logical == "embed"}
    assert quarter["word_embedding"] == (128, 16)
    assert {p.name: p.shard for p in split.parameters if p.name in quarter} == quarter
    assert split.optimizer < 0.3 * shared.optimizer
    assert split.gradients == shared.gradients == shared.weights


def test_schedule_of_a_configuration():
    """16 samples in micro batches of 2 are 8 microbatches; on 2 replicas each has 4 of them."""
    config = load_config("quickstart.yaml", ["parallel.pipe=2", "train.micro_batch_size=2"]).config
    alone, shared = schedule_of(config), schedule_of(config, devices=4)
    assert (len(alone.stages), alone.chunks, alone.microbatches) == (2, 1, 8)
    assert shared.microbatches == 4
    assert (alone.bubble_fraction, shared.bubble_fraction) == (1 / 8, 1 / 4)


def test_schedule_as_text_and_picture(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    picture = tmp_path / "schedule.svg"
    layout = "quickstart.yaml parallel.pipe=2 parallel.chunks=2 train.micro_batch_size=8 --schedule --svg"
    assert main([*layout.split(), str(picture)]) == 0
    assert capsys.readouterr().out == (
        "interleaved 1F1B (stages 2, chunks 2, microbatches 2): bubble 25.0% of the ideal time, "
        "chunk activations in flight: 4 at most\n"
        "stage 0  F0.0 F0.1 F1.0 F1.1 .    .    B1.0 B1.1 B0.0 B0.1\n"
        "stage 1  .    F0.0 F0.1 F1.0 B1.0 F1.1 B1.1 B0.0 B0.1 .\n"
    )
    assert "chunks 2, microbatches 2" in ElementTree.parse(picture).getroot()[0].text
    assert list(tmp_path.iterdir()) == [picture]


def test_schedule_fits_the_terminal(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    monkeypatch.setenv("COLUMNS", "60")
    assert main("quickstart.yaml parallel.pipe=2 train.micro_batch_size=1 --schedule".split()) == 0
    _, first, last = capsys.readouterr().out.splitlines()
    assert first.startswith("stage 0  F0  F1 ")
    assert "~" in first
    assert max(len(first), len(last)) <= 60


def test_explanation_of_a_parameter(capsys: pytest.CaptureFixture[str]):
    """2 of 4 layers of a [128, 4 x 3 x 32] matrix; M = 2 microbatches on 2 stages make 3 ticks, each with 2 layers."""
    layout = "quickstart.yaml parallel.pipe=2 parallel.tensor=2 parallel.fsdp=2 train.micro_batch_size=4".split()
    assert main([*layout, "--explain", "layers.attention.qkv"]) == 0
    lines = [[cell.strip() for cell in line.split("  ") if cell] for line in capsys.readouterr().out.splitlines()]
    assert lines[0] == ["blocks.attention.qkv: 196,608 numbers"]
    assert ["128", "embed", "fsdp 2", "-", "ZeRO-3 (1910.02054): split at rest, gathered when the layer runs"] in lines
    assert ["a device holds 2 x 64 x 2 x 3 x 32 of it: 98,304 bytes in fp32, without optimizer state"] in lines
    assert ["all-gather", "weight, forward and backward", "fsdp 2", "12", "0.094", "1.125"] in lines
    assert ["reduce-scatter", "gradient of the input", "tensor 2", "6", "0.250", "1.500"] in lines


def test_explanation_of_a_parameter_that_nothing_shares(capsys: pytest.CaptureFixture[str]):
    assert main("quickstart.yaml --explain word_embedding".split()) == 0
    assert "it causes no collectives" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("quickstart.yaml --explain layers.attention.kqv", "no such parameter; choose one of blocks.attention.out, "),
        (
            "models/mixtral_8x7b.yaml model.dense_layers=1 --explain layers.attention.qkv",
            "model.dense_layers 1: costs are known of mixtures whose layers all have experts; plan or explain",
        ),
        ("nowhere.yaml", "nowhere.yaml not found"),
        ("quickstart.yaml --devices 0", "--devices is 0: expected 1 or more"),
        ("quickstart.yaml --devices many", "--devices: invalid int value: 'many'"),
        ("quickstart.yaml parallel.tensor=2 --devices 3", "number of devices 3 is not a multiple of"),
        ("quickstart.yaml parallel.tensor=3", "model.num_heads 4 is not a multiple of parallel.tensor 3"),
        ("model.num_layers=2", "model.vocab_size is not known: set it, or give a tokenizer"),
        ("tokenizer.type=huggingface tokenizer.model=none.json", "none.json: no such file"),
        ("quickstart.yaml --svg drawing.svg", "--svg draws the pipeline's schedule: give --schedule as well"),
        ("quickstart.yaml --schedule --svg nowhere/drawing.svg", "cannot write nowhere/drawing.svg: No such file or"),
        ("quickstart.yaml parallel.pipe=2 --schedule --devices 3", "number of devices 3 is not a multiple of"),
        ("quickstart.yaml --schedule --devices 3", "train.global_batch_size 16 is not a multiple of"),
    ],
)
def test_bad_input(words: str, message: str, capsys: pytest.CaptureFixture[str]):
    assert main(words.split()) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert message in error


def test_dimension_that_no_mesh_divides():
    config = replace(TINY, parallel=ParallelConfig(fsdp=3))
    with pytest.raises(InputError, match=r"blocks.attention.out: dim 3 \(embed\) has 64 entries, not divisible by"):
        sharding_of(config)
