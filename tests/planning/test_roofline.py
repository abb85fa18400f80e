"""The parts of a predicted step, compared with values by hand, and properties of all layouts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megajax.config import Config, DataConfig, InputError, ModelConfig, ParallelConfig, TrainConfig
from megajax.config.parallel import AXES
from megajax.costs.device import Device
from megajax.costs.flops import count_flops
from megajax.costs.hardware import GPUS, Gpu, gpu_named
from megajax.planning.cut import MEGATRON
from megajax.planning.operations import (
    DISTURBANCE,
    HANDSHAKE,
    LAUNCH,
    beside,
    gather_seconds,
    matmul_seconds,
    memory_seconds,
    send_seconds,
)
from megajax.planning.roofline import LABELS, StepTime, step_time

H100 = gpu_named("H100")
MODEL = ModelConfig(num_layers=24, hidden_size=2048, num_heads=16, vocab_size=51_200, max_positions=2048)


def layout(train: dict[str, Any] | None = None, **parallel: Any) -> tuple[Config, dict[str, int]]:
    config = Config(
        model=MODEL,
        data=DataConfig(seq_length=2048),
        train=TrainConfig(**{"precision": "bf16", "global_batch_size": 256, **(train or {})}),
        parallel=ParallelConfig(**{"data": 1} | parallel),
    )
    return config, {axis: getattr(config.parallel, axis) for axis in AXES}


def predict(gpu: Gpu = H100, train: dict[str, Any] | None = None, **parallel: Any) -> StepTime:
    return step_time(*layout(train, **parallel), gpu)


# Operations


def test_large_matrix_product_runs_at_its_share_of_the_peak() -> None:
    n = 131_072
    assert matmul_seconds(H100, n, n, n) == pytest.approx(2 * n**3 / (989.5e12 * 0.66), rel=0.003)


def test_small_matrix_product_is_slower_than_its_flops() -> None:
    """16 tiles on 132 multiprocessors, each as long as a start and an end: 16 / (16 + 66) x 1 / 2 of the rate."""
    expected = 2 * 1024 * 256 * 512 / (989.5e12 * 0.66 * 16 / 82 / 2) + LAUNCH
    assert matmul_seconds(H100, 1024, 256, 512) == pytest.approx(expected)


def test_thin_matrix_product_is_limited_by_memory() -> None:
    """A decoder's: one row of activations, so the weights are read for two FLOPs each."""
    traffic = 2 * (8192 + 8192 * 8192 + 8192)
    assert matmul_seconds(H100, 1, 8192, 8192) >= memory_seconds(H100, traffic)
    assert memory_seconds(H100, 3.35e12) == pytest.approx(1 / 0.85)


def test_gather_in_a_node_and_between_nodes() -> None:
    inside = gather_seconds(H100, 8e9, 8, stride=1)
    assert inside == pytest.approx(HANDSHAKE + 7e9 / (450e9 * 0.82))
    # 2 nodes of 8: half of it comes from the other node, over eight network cards.
    assert gather_seconds(H100, 8e9, 16, stride=1) == pytest.approx(2 * HANDSHAKE + 7.5e9 / (450e9 * 0.82))
    # 16 nodes, one member on each: one network card.
    assert gather_seconds(H100, 8e9, 16, stride=8) == pytest.approx(5 * HANDSHAKE + 7.5e9 / (50e9 * 0.85))
    assert gather_seconds(H100, 8e9, 1, stride=1) == 0
    assert send_seconds(H100, 1e9, 8, stride=8) == pytest.approx(HANDSHAKE + 1e9 / (50e9 * 0.85))


def test_nodes_are_as_large_as_nvlink_reaches() -> None:
    gb200 = gpu_named("GB200")
    assert gather_seconds(gb200, 8e9, 8, stride=8) < gather_seconds(gpu_named("B200"), 8e9, 8, stride=8) / 10


def test_what_runs_beside_costs_what_it_disturbs() -> None:
    assert beside(2, 5) == 2 * DISTURBANCE
    assert beside(5, 2) == 3 + 2 * DISTURBANCE
    assert beside(5, 9, exposed=1) == 1 + 4 * DISTURBANCE
    assert beside(5, 0) == 5


# Steps


def test_parts_add_up() -> None:
    time = predict(pipe=4, chunks=2, tensor=2, data=2, fsdp=2)
    assert set(time.parts) == set(LABELS)
    assert time.seconds == pytest.approx(sum(time.parts.values()))
    assert min(time.parts.values()) >= 0
    assert time.tokens_per_second == pytest.approx(256 * 2048 / time.seconds)
    assert time.days(86_400 * time.tokens_per_second) == pytest.approx(1)
    assert time.gpu_hours(3600 * time.tokens_per_second) == pytest.approx(32)


def test_utilisation() -> None:
    """On one device with everything kept, what runs is the model's arithmetic, but for flash attention's repetition."""
    time = predict(train={"remat": "none"})
    flops = count_flops(MODEL, 256, 2048, "causal")
    assert time.mfu("causal") == pytest.approx(flops.model / time.seconds / 989.5e12)
    assert time.tflops("full") > time.tflops("causal")
    backward_again = 0.5 * flops.core
    assert time.executed_flops == pytest.approx(flops.model + backward_again)
    assert time.hfu == pytest.approx((flops.model + backward_again) / time.seconds / 989.5e12)


def test_full_recomputation_runs_the_blocks_once_more() -> None:
    """All of a layer but its last product, which nothing needs."""
    kept, again = predict(train={"remat": "none"}), predict(train={"remat": "full"})
    flops = count_flops(MODEL, 256, 2048, "causal")
    assert again.executed_flops - kept.executed_flops == pytest.approx(flops.projections + flops.core + flops.mlp / 2)
    assert again.seconds > kept.seconds


def test_bubble_of_the_schedule() -> None:
    """(P - 1) / (v M) of the work of a stage, here without the work on the vocabulary."""
    time = predict(pipe=4, chunks=2, train={"micro_batch_size": 4})
    busy = sum(time.parts[part] for part in ("matmul", "attention", "memory", "pipe"))
    assert time.parts["bubble"] < busy * 3 / (2 * 64) < 1.3 * time.parts["bubble"]
    halved = predict(pipe=4, chunks=1, train={"micro_batch_size": 4})
    assert halved.parts["bubble"] == pytest.approx(2 * time.parts["bubble"], rel=0.05)


def test_zero_shards_the_optimizer() -> None:
    plain, sharded = predict(data=8), predict(data=8, zero=1)
    assert sharded.parts["optimizer"] == pytest.approx(plain.parts["optimizer"] / 8)
    assert sharded.parts["data"] < plain.parts["data"]  # weights are gathered in bf16


def test_context_passes_the_scores_through_memory() -> None:
    """Where cuDNN's kernel cannot run, the plan knows."""
    assert predict(tensor=2).parts["attention"] > 0
    assert predict(context=2).parts["attention"] == 0
    assert predict(context=2).parts["memory"] > 2 * predict(tensor=2).parts["memory"]


def test_limit_is_said() -> None:
    assert predict().limit.startswith("matrix products ")
    slow = replace(H100, network_bandwidth=1e9)
    assert predict(slow, data=64, train={"global_batch_size": 64}).limit.startswith("communication over data ")


def test_megatron_keeps_the_head_on_the_last_stage() -> None:
    """With one layer less there, where the layers do not divide."""
    config, mesh = layout(pipe=8)
    assert Device(config, mesh).layers == 3
    uneven = replace(config, model=replace(MODEL, num_layers=23))
    assert Device(uneven, mesh).layers == 3
    megatron = step_time(config, mesh, H100, MEGATRON)
    assert step_time(uneven, mesh, H100, MEGATRON).seconds < megatron.seconds


def test_numbers_that_the_gpu_lacks() -> None:
    config, mesh = layout()
    with pytest.raises(InputError, match=r"A100-80GB has no fp8: plan for 16-bit"):
        step_time(config, mesh, gpu_named("a100-80gb"), replace(MEGATRON, fp8=True))
    fp8, half = (step_time(config, mesh, H100, replace(MEGATRON, fp8=fp8)) for fp8 in (True, False))
    assert fp8.seconds < half.seconds
    assert predict(train={"precision": "fp32"}).seconds > 1.5 * predict().seconds


def test_unknown_gpu() -> None:
    with pytest.raises(InputError, match=r"unknown GPU 'h1000': known are A100-40GB, .*; to add it, write a line into"):
        gpu_named("h1000")
    assert gpu_named("h100") is H100


FASTER = ("half_tflops", "memory_bandwidth", "link_bandwidth", "network_bandwidth")


@given(
    gpu=st.sampled_from(GPUS),
    peak=st.sampled_from(FASTER),
    factor=st.floats(1, 100),
    megatron=st.booleans(),
    sizes=st.sampled_from(
        [{"tensor": 8}, {"pipe": 4, "chunks": 3, "data": 8, "zero": 1}, {"fsdp": 32}, {"context": 4, "data": 16},
         {"pipe": 8, "tensor": 4, "data": 4}, {"tensor": 2, "fsdp": 4, "data": 4, "sequence_parallel": False}]
    ),
    remat=st.sampled_from(["none", "selective", "full", ("qkv",)]),
)  # fmt: skip
def test_a_faster_part_never_makes_a_step_slower(
    gpu: Gpu, peak: str, factor: float, megatron: bool, sizes: dict[str, Any], remat: Any
) -> None:
    config, mesh = layout({"remat": remat}, **sizes)
    trainer = [MEGATRON] if megatron else []
    before = step_time(config, mesh, gpu, *trainer).seconds
    after = step_time(config, mesh, replace(gpu, **{peak: factor * getattr(gpu, peak)}), *trainer).seconds
    assert after <= before * (1 + 1e-9)


@given(batch=st.sampled_from([256, 512, 1024]), pipe=st.sampled_from([1, 2, 4]), tensor=st.sampled_from([1, 2, 4]))
def test_twice_the_batch_takes_longer_and_no_longer_than_twice(batch: int, pipe: int, tensor: int) -> None:
    one, two = (predict(train={"global_batch_size": n}, pipe=pipe, tensor=tensor) for n in (batch, 2 * batch))
    assert one.seconds < two.seconds <= 2 * one.seconds
