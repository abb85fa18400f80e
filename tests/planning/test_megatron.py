"""Memory of Megatron-LM, compared with 2205.05198 (sequence parallelism and selective recomputation)."""

from __future__ import annotations

from dataclasses import replace

import pytest

from megajax.config import Config, DataConfig, InputError, ModelConfig, ParallelConfig, TrainConfig
from megajax.config.parallel import AXES
from megajax.costs.weights import parameter_count
from megajax.planning.megatron import (
    layer_activations,
    layers_in_flight,
    megatron_memory,
    stage_parameters,
)
from megajax.planning.plan import plan

S, T, GIB, MIB = 2048, 8, 2**30, 2**20


def config_of(heads: int, hidden: int, layers: int, micro: int = 1, **parallel: int) -> Config:
    """A model of table 3, with dropout, as 2205.05198 counts it."""
    layout = ParallelConfig(**({"data": 1} | parallel))
    return Config(
        model=ModelConfig(
            num_layers=layers,
            hidden_size=hidden,
            num_heads=heads,
            vocab_size=51_200,
            max_positions=S,
            attention_dropout=0.1,
            hidden_dropout=0.1,
        ),
        data=DataConfig(seq_length=S),
        train=TrainConfig(micro_batch_size=micro, global_batch_size=micro * 512, attention="xla", remat="none"),
        parallel=layout,
    )


def mesh_of(config: Config) -> dict[str, int]:
    return {axis: getattr(config.parallel, axis) for axis in AXES}


def layer_bytes(config: Config, remat: str, sequence_parallel: bool) -> float:
    parallel = replace(config.parallel, sequence_parallel=sequence_parallel)
    config = replace(config, train=replace(config.train, remat=remat), parallel=parallel)
    return layer_activations(config, mesh_of(config))


@pytest.mark.parametrize(("heads", "hidden", "micro"), [(64, 6144, 4), (96, 12288, 1), (128, 20480, 1)])
def test_bytes_of_a_layer(heads: int, hidden: int, micro: int) -> None:
    """Table 2, in elements s b h of the residual stream."""
    one, many = (config_of(heads, hidden, 1, micro, tensor=t) for t in (1, T))
    stream, core = S * micro * hidden, 5 * heads * S / hidden
    assert layer_bytes(one, "none", False) == pytest.approx(stream * (34 + core))
    assert layer_bytes(many, "none", False) == pytest.approx(stream * (10 + 24 / T + core / T))
    assert layer_bytes(many, "none", True) == pytest.approx(stream / T * (34 + core))
    assert layer_bytes(many, "selective", False) == stream * (10 + 24 / T)
    assert layer_bytes(many, "selective", True) == 34 * stream / T
    assert layer_bytes(many, "full", False) == 2 * stream
    assert layer_bytes(many, "full", True) == 2 * stream / T


@pytest.mark.parametrize(
    ("shape", "pipe", "chunks", "mebibytes", "first_stage"),
    [
        pytest.param((64, 6144, 48, 4), 1, 1, (1264, 844, 624, 204, 96), (59.3, 39.6, 29.3, 9.6, 4.5), id="22B"),
        pytest.param((96, 12288, 96), 8, 3, (552, 342, 312, 102, 48), (66.8, 41.4, 37.8, 12.4, 5.8), id="175B"),
        pytest.param((128, 20480, 105), 35, 3, (840, 490, 520, 170, 80), (114, 66.5, 70.6, 23.1, 10.9), id="530B"),
        pytest.param((160, 25600, 128), 64, 1, (1050, 612.5, 650, 212.5, 100), (131, 76.6, 81.3, 26.6, 12.5), id="1T"),
    ],
)
def test_published_models(
    shape: tuple[int, ...], pipe: int, chunks: int, mebibytes: tuple[float, ...], first_stage: tuple[float, ...]
) -> None:
    """MiB of a layer, GiB of the first stage: tensor alone, with sequence parallelism, with selective, with both, full.

    Interleaving holds (1 + (P - 1) / P v) L layers' worth (section 4.2.3).
    """
    config = config_of(*shape, tensor=T, pipe=pipe, chunks=chunks)
    layers = layers_in_flight(config, mesh_of(config), 0)
    assert layers == pytest.approx(shape[2] * (1 + (pipe - 1) / (pipe * chunks) * (chunks > 1)))
    policies = (("none", False), ("none", True), ("selective", False), ("selective", True), ("full", False))
    sizes = [layer_bytes(config, *policy) for policy in policies]
    assert [size / MIB for size in sizes] == list(mebibytes)
    assert [size * layers / GIB for size in sizes] == pytest.approx(first_stage, rel=0.01)


def test_in_flight_is_capped_by_the_microbatches() -> None:
    config = config_of(32, 4096, 32, pipe=4, chunks=8)
    few = replace(config, train=replace(config.train, global_batch_size=4))
    mesh = mesh_of(config)
    assert [layers_in_flight(config, mesh, stage) for stage in range(4)] == [35, 33, 31, 29]
    assert [layers_in_flight(few, mesh, stage) for stage in range(4)] == [32, 32, 31, 29]
    plain = replace(few, parallel=replace(few.parallel, chunks=1))
    assert [layers_in_flight(plain, mesh, stage) for stage in range(4)] == [32, 24, 16, 8]


def test_uneven_stages() -> None:
    """8 layers on 3 stages; the heaviest has 3 of them, and norms are whole on every tensor rank."""
    config = config_of(8, 512, 8, pipe=3, tensor=2)
    matrices, biases, norms = 12 * 512**2, 3 * 512 + 4 * 512, 4 * 512 + 2 * 512  # norms and row-parallel biases
    assert stage_parameters(config, mesh_of(config), 1) == 3 * ((matrices + biases) / 2 + norms)


def test_bytes_of_a_parameter() -> None:
    """18, or with the distributed optimizer 6 + 12 / data; a tied embedding is on two stages."""
    config = config_of(16, 2048, 24, data=4)
    mesh, parameters = mesh_of(config), parameter_count(config.model)
    whole = megatron_memory(config, mesh, 0)
    assert whole.persistent + whole.gradients + whole.compute_copy == 18 * parameters
    shared = megatron_memory(replace(config, parallel=replace(config.parallel, zero=1)), mesh, 0)
    assert shared.persistent + shared.gradients + shared.compute_copy == (6 + 12 / 4) * parameters
    staged = mesh | {"pipe": 2}
    both = stage_parameters(config, staged, 0) + stage_parameters(config, staged, 1)
    assert both == parameters + 51_200 * 2048


def test_the_fullest_stage_is_the_first_or_has_the_logits() -> None:
    config = config_of(16, 2048, 24, micro=8, pipe=4)
    assert plan(config, like="megatron").fullest == "first"
    wide = replace(config, model=replace(config.model, vocab_size=10_240_000, tied_head=False))
    planned = plan(wide, like="megatron")
    assert planned.fullest == "last"
    assert planned.stages["last"] == megatron_memory(wide, mesh_of(wide), 3)


def test_names_of_activations_are_ours_alone() -> None:
    config = config_of(16, 2048, 24)
    named = replace(config, train=replace(config.train, remat=("qkv",)))
    with pytest.raises(InputError, match="Megatron-LM cannot: choose none, selective or full"):
        megatron_memory(named, mesh_of(named), 0)
