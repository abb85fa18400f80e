"""The planner as a function: values of a plan, collectives of its parameters, and remedies if it does not fit."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import megajax.planning
from megajax.config import Config, DataConfig, InputError, ModelConfig, ParallelConfig, TrainConfig, load_config
from megajax.config.parallel import AXES
from megajax.costs.hardware import gpu_named
from megajax.planning.explain import causes
from megajax.planning.plan import Plan, columns, plan
from megajax.planning.search import smallest_remedy
from megajax.show import sharding_of

SMALL = Config(
    model=ModelConfig(num_layers=8, hidden_size=1024, num_heads=16, max_positions=1024, vocab_size=51_200),
    data=DataConfig(seq_length=1024),
    train=TrainConfig(steps=1, global_batch_size=16, precision="bf16"),
)


def planned(**parallel: int) -> Plan:
    return plan(replace(SMALL, parallel=ParallelConfig(**parallel)))


def test_the_package_offers_it():
    """A single H100: nothing is sent, and stages do not differ."""
    alone = megajax.planning.plan(SMALL)
    assert isinstance(alone, megajax.planning.Plan)
    assert (alone.gpu.name, alone.gpus, alone.fits, alone.bubble) == ("H100", 1, True, 0)
    assert alone.communication == {}
    assert alone.stages["first"] == alone.stages["last"]
    assert "a single GPU sends nothing" in str(alone)


def test_gpus_that_the_mesh_leaves_are_replicas():
    parallel = ParallelConfig(tensor=2)
    assert plan(replace(SMALL, parallel=parallel), gpus=8).mesh["data"] == 4
    assert plan(replace(SMALL, parallel=parallel)).gpus == 2


def test_a_gpu_of_your_own():
    """Twice the memory bandwidth, half the memory."""
    h100 = gpu_named("h100")
    other = replace(h100, memory_bandwidth=2 * h100.memory_bandwidth, memory_bytes=h100.memory_bytes / 2)
    faster, slower = plan(SMALL, other), plan(SMALL, h100)
    assert faster.time.seconds < slower.time.seconds
    assert faster.limit == slower.limit / 2


def test_communication_over_wires():
    """Tensor shards are neighbours; 4 x 8 devices apart is another node. ZeRO-1 gathers bf16 weights as well."""
    split, whole = (planned(pipe=2, data=4, tensor=4, zero=zero).communication for zero in (1, 0))
    assert {axis: sent.wire for axis, sent in split.items()} == {
        "pipe": "network",
        "data": "network",
        "tensor": "NVLink",
    }
    assert split["data"].bytes == pytest.approx(whole["data"].bytes * (4 + 2) / 4)
    assert split["tensor"] == whole["tensor"]


@pytest.mark.parametrize("remat", ["none", "selective", "full"])
def test_hardware_flops_are_those_of_the_papers(remat: str):
    flops = plan(replace(SMALL, train=replace(SMALL.train, remat=remat)))
    assert flops.hardware_flops["full"] == flops.flops["full"].hardware(remat)


def test_activations_kept_by_name_have_no_formula():
    kept = plan(replace(SMALL, train=replace(SMALL.train, remat=("qkv",))))
    assert kept.hardware_flops is None
    assert kept.as_dict()["flops"]["full"]["hardware"] is None
    assert "full attention" in str(kept)


def assert_caused_is_sent(whole: Plan):
    """What the parameters of a plan cause adds up to what it sends over every axis but `pipe`, within 3 %."""
    total = dict.fromkeys(AXES, 0.0)
    for p in sharding_of(whole.config, whole.gpus).parameters:
        for cause in causes(whole.config, whole.mesh, p.name, p.shape, p.rules):
            total[cause.axis] += cause.count * cause.bytes
    expected = {axis: sent.bytes for axis, sent in whole.communication.items() if axis != "pipe"}
    assert {axis: total[axis] for axis in expected} == pytest.approx(expected, rel=0.03)


@pytest.mark.parametrize(
    "parallel",
    [
        {"fsdp": 2, "tensor": 4},
        {"pipe": 2, "chunks": 2, "data": 2, "tensor": 2},
        {"pipe": 4, "data": 2, "zero": 1},
        {"tensor": 4, "sequence_parallel": False},
        {"context": 4, "tensor": 2},
    ],
    ids=str,
)
def test_parameters_cause_what_is_sent(parallel: dict[str, int]):
    """Bytes over every axis but `pipe`, which activations cross by themselves; positions and vectors are the 3 %."""
    assert_caused_is_sent(planned(**parallel))


def test_smallest_remedy_is_the_fastest_of_the_smallest():
    """13 billion parameters of 16 bytes do not fit on one GPU. One change on 8 GPUs does: weights sharded."""
    config = load_config("models/gpt3_13b.yaml", ["train.precision=bf16"]).config
    failed = plan(config, gpus=8)
    words, fitting = smallest_remedy(failed)
    assert not failed.fits
    assert fitting.fits
    assert fitting.gpus == 8
    assert words == "parallel.data=2 parallel.fsdp=4"


@settings(max_examples=15)
@given(
    st.sampled_from(["gpt3_1.3b", "gpt3_6.7b", "llama3_8b"]),
    st.sampled_from([1, 2, 8]),
    st.sampled_from([1, 8, 32]),
    st.sampled_from(["megajax", "megatron"]),
)
def test_a_remedy_fits(preset: str, gpus: int, micro_batch: int, like: str):
    words = [f"train.micro_batch_size={micro_batch}", "train.global_batch_size=512", "train.precision=bf16"]
    failed = plan(load_config(f"models/{preset}.yaml", words).config, "a100-80gb", gpus, like)
    if failed.fits:
        return
    change, fitting = smallest_remedy(failed)
    assert fitting.fits
    options, keys = [], []
    for word in change.split():
        (keys if "=" in word else options).append(word)
    again = plan(
        load_config(f"models/{preset}.yaml", [*words, *keys]).config,
        "a100-80gb",
        int(options[1]) if options else gpus,
        like,
    )
    assert again.need == fitting.need


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ({"gpu": "tpu"}, "unknown GPU 'tpu'"),
        ({"gpus": 3}, "not a multiple"),
        ({"gpus": -1}, "-1 GPUs cannot train"),
        ({"tokens": 0}, "tokens is 0: expected more than 0"),
    ],
)
def test_bad_input(words: dict, message: str):
    with pytest.raises(InputError, match=message):
        plan(SMALL, **words)


def test_weights_that_the_mesh_does_not_divide():
    """ZeRO-1 cuts 1024 columns over 3 replicas."""
    config = replace(SMALL, parallel=ParallelConfig(data=3, zero=1), train=replace(SMALL.train, global_batch_size=3))
    with pytest.raises(InputError, match=r"has 1024 entries, not divisible by data x fsdp = 3"):
        plan(config)


def test_columns():
    assert columns([("a", "b"), ("long", "10")]) == "a      b\nlong  10"
    assert columns([("a", "b"), ("long", "10")], left=(0, 1)) == "a     b\nlong  10"
