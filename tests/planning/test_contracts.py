"""A step of 175 billion parameters on 128 H100s sends only what it must, and its memory does not grow with the batch.

The real step of 96 layers, compiled without a GPU for pipe 8 x data 2 x tensor 8, in bf16 with cuDNN attention and
selective recomputation. Loops of a record are (ticks, layers): the pipeline's steady state has as many ticks as there
are microbatches, its warm-up (forward only) and its cool-down (backward only) one less than there are stages.
"""

from __future__ import annotations

from math import prod

import jax
import pytest

from megajax.planning.collectives import Traffic, collectives
from megajax.planning.deviceless import CompiledStep, compile_step, has_compiler
from megajax.planning.plan import plan
from tests.planning.compiled_memory import NODES_16, published, ring_bytes

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not has_compiler(), reason="compiling for a GPU that is not there needs the CUDA plugin"),
]

P, M, LAYERS, S, D, TENSOR = 8, 32, 12, 2048, 12288, 8
WARMUP = COOLDOWN = P - 1
RESIDUAL = 2 * S * D
"""Bytes of a microbatch's activations between two layers, bf16 [1, S, D]."""


def compile_microbatches(microbatches: int) -> CompiledStep:
    config = published("megatron_175b", f"{NODES_16} train.global_batch_size={2 * microbatches}")
    compiled = compile_step(config, "H100")
    gib = compiled.step.memory_analysis().temp_size_in_bytes / 2**30
    print(f"\nM = {microbatches}: compiled in {compiled.seconds:.1f} s, {gib:.2f} GiB of temporary buffers per GPU")
    return compiled


@pytest.fixture(scope="module")
def compiled() -> CompiledStep:
    return compile_microbatches(M)


@pytest.fixture(scope="module")
def traffic(compiled: CompiledStep) -> Traffic:
    found = collectives(compiled.step, compiled.rules.mesh)
    print(found)
    return found


@pytest.mark.parametrize("ticks", [M, WARMUP])
def test_a_layer_sends_what_megatron_sends_over_tensor(traffic: Traffic, ticks: int):
    """2205.05198 §4.2.2, and the inputs gathered again for the weight gradients; forward and backward of every tick."""
    layers = traffic.inside(ticks, LAYERS)
    residual = layers.of_at_least(RESIDUAL)
    assert {(record.axes, record.bytes) for record in residual} == {(("tensor",), RESIDUAL)}
    assert residual.forward().count("all-gather") == 2 * ticks * LAYERS
    assert residual.forward().count("reduce-scatter") == 2 * ticks * LAYERS
    assert residual.backward().count("all-gather") == 4 * ticks * LAYERS
    assert residual.backward().count("reduce-scatter") == 2 * ticks * LAYERS
    assert residual.total_bytes() == 10 * ticks * LAYERS * RESIDUAL  # so there are no all-reduces, or anything else


def test_all_else_in_a_layer_is_gradients_of_norms_and_biases(traffic: Traffic):
    """They are replicated over `tensor`, each device having seen its part of the sequence: vectors of D numbers."""
    small = traffic.where(lambda record: LAYERS in record.loop and record.bytes < RESIDUAL)
    assert {record.axes for record in small} == {("tensor",)}
    assert small == small.backward()
    # Scale and bias of two norms, and the biases of both row-parallel products, in one call; fp32, so that nothing is
    # lost of sums over thousands of tokens.
    assert max(record.bytes for record in small) <= 6 * 4 * D


def test_a_tick_sends_activations_forward_and_gradients_back(traffic: Traffic):
    """Two [1, S / tensor, D] to the neighbours in a steady tick, one in the others."""
    sent = traffic.where(lambda record: record.op == "collective-permute")
    assert {(record.axes, record.bytes, record.conditional) for record in sent} == {
        (("pipe",), RESIDUAL // TENSOR, False)
    }
    assert sent.inside(M).count("collective-permute") == 2 * M
    assert sent.inside(WARMUP).count("collective-permute") == WARMUP + COOLDOWN
    assert len(sent) == 4


def test_gradients_cross_data_once_a_step(compiled: CompiledStep, traffic: Traffic):
    """Outside all loops, every parameter once: fp32, as much as a GPU holds; and the loss, and the number of tokens."""
    data = traffic.over("data")
    assert data == data.inside()
    assert data.count("all-reduce") == len(data)
    held = sum(prod(leaf.sharding.shard_shape(leaf.shape)) for leaf in jax.tree.leaves(compiled.state.params))
    assert data.total_bytes() == 4 * held + 4 + 4


def test_every_loop_sends_what_the_plan_says(traffic: Traffic):
    """Over every axis; each branch (embedding, head) is taken M times: in all steady ticks, or before them instead."""
    closed = plan(published("megatron_175b", f"{NODES_16} train.global_batch_size={2 * M}"), "h100").communication
    taken = traffic.where(lambda record: not record.conditional or "steady_ticks" in record.source)
    sizes = {(axis, place): size for axis, sent in closed.items() for place, size in sent.places.items()}
    found = {(axis, place): taken.over(axis).at(place).total_bytes() for axis, place in sizes}
    assert {axis for axis, _ in sizes} == {"tensor", "pipe", "data"}
    assert found == pytest.approx(sizes, rel=0.02, abs=2**18)


def test_the_ring_stores_what_selective_recomputation_names(compiled: CompiledStep):
    """Block input 2, qkv 6, attention output 2, residual 2, MLP 8: 20 S D / tensor bytes of a layer."""
    config = published("megatron_175b", NODES_16)
    assert ring_bytes(config, compiled.step) == (2 * P - 1) * LAYERS * 20 * S * D // TENSOR


def test_the_backward_runs_no_second_forward(compiled: CompiledStep):
    """But for the attention kernel, whose statistics selective recomputation does not keep.

    A layer multiplies by 4 matrices forward, 8 backward, the head 3 times; warm-up and steady state hold one forward,
    steady state and cool-down one backward.
    """
    program = compiled.step.as_text()
    assert program.count(" dot(") == 2 * 4 + 2 * 8 + 3
    assert program.count('custom_call_target="__cudnn$fmhaSoftmax"') == 2 + 2
    assert program.count('custom_call_target="__cudnn$fmhaSoftmaxBackward"') == 2


def test_memory_does_not_depend_on_the_number_of_microbatches(compiled: CompiledStep):
    """Four times the batch: the same activations in flight."""
    few, many = (step.step.memory_analysis().temp_size_in_bytes for step in (compiled, compile_microbatches(4 * M)))
    assert many == pytest.approx(few, rel=0.01)
