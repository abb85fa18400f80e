"""The real training step, compiled for absent GPUs, sends only what it must."""

from math import prod

import jax
import jax.numpy as jnp
import pytest

from megajax.config import Config, DataConfig, InputError, ModelConfig, ParallelConfig, TrainConfig
from megajax.costs.hardware import find_gpu
from megajax.parallel.mesh import build_mesh
from megajax.parallel.rules import Rules
from megajax.planning.collectives import collectives
from megajax.planning.deviceless import TARGETS, compile_step, gpu_topology, has_compiler
from megajax.training.batches import batch_shardings
from megajax.training.schedule import Schedule
from megajax.training.step import build_init, build_train_step
from tests.planning.compiled_memory import published

pytestmark = pytest.mark.slow

M, B, S, L, D = 2, 8, 1024, 3, 1024
SIZES = {"pipe": 1, "data": 2, "fsdp": 2, "expert": 1, "context": 1, "tensor": 8}

needs_compiler = pytest.mark.skipif(
    not has_compiler(), reason="compiling for a GPU that is not there needs the CUDA plugin"
)


def test_unknown_gpu():
    with pytest.raises(InputError, match="'V100': choose one of A100-80GB, H100, H200, B200, GB200"):
        gpu_topology("V100", 8)


@pytest.mark.parametrize("devices", [0, 12])
def test_hosts_are_full(devices):
    with pytest.raises(InputError, match="do not fill hosts of 8"):
        gpu_topology("H100", devices)


@pytest.mark.skipif(has_compiler(), reason="the CUDA plugin is installed")
def test_without_the_plugin():
    with pytest.raises(InputError, match=r"pip install 'megajax\[cuda13\]'"):
        gpu_topology("H100", 8)


@needs_compiler
@pytest.mark.parametrize("name", TARGETS)
def test_every_target_is_known_to_the_roofline(name):
    assert find_gpu(TARGETS[name].chip.device_kind).name == name
    devices = gpu_topology(name, 16)
    assert [device.process_index for device in devices] == [0] * 8 + [1] * 8
    assert {device.device_kind for device in devices} == {TARGETS[name].chip.device_kind}


@pytest.fixture(scope="module")
def compiled_step():
    """Abstract state and traffic of a 3-layer GPT in bf16, two microbatches of 2 samples per replica."""
    rules = Rules(build_mesh(SIZES, gpu_topology("H100", 32)))
    config = Config(
        model=ModelConfig(num_layers=L, hidden_size=D, num_heads=16, max_positions=S, vocab_size=51_200),
        data=DataConfig(seq_length=S),
        train=TrainConfig(steps=10, global_batch_size=M * B, micro_batch_size=2, precision="bf16"),
        parallel=ParallelConfig(**SIZES),
    )
    step = build_train_step(config, rules, Schedule.from_config(config.optim, 10, M * B), "cudnn")
    _, abstract, shardings = build_init(config, rules)
    state = jax.tree.map(lambda x, at: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=at), abstract, shardings)
    dtypes = {"loss_mask": jnp.float32, "sample_ids": jnp.uint32}
    batch = {
        name: jax.ShapeDtypeStruct((M, B, S)[: len(at.spec)], dtypes.get(name, jnp.int32), sharding=at)
        for name, at in batch_shardings(rules, config.model, config.data).items()
    }
    return state, collectives(step.lower(state, batch).compile(), rules.mesh)


@needs_compiler
def test_a_layer_sends_what_megatron_sends_over_tensor(compiled_step):
    """2205.05198 §4.2.2, and the inputs gathered again for the weight gradients; bf16 [2, S, D] each."""
    _, traffic = compiled_step
    residual = traffic.inside(M, L).over("tensor").of_at_least(2 * 2 * S * D)
    assert {(record.axes, record.shape, record.dtype) for record in residual} == {(("tensor",), (2, S, D), "bf16")}
    assert residual.forward().count("all-gather") == 2 * M * L
    assert residual.forward().count("reduce-scatter") == 2 * M * L
    assert residual.backward().count("all-gather") == 4 * M * L
    assert residual.backward().count("reduce-scatter") == 2 * M * L
    assert residual.total_bytes() == 10 * M * L * (2 * 2 * S * D)


@needs_compiler
def test_a_layer_gathers_weights_and_scatters_gradients_over_fsdp(compiled_step):
    """qkv, attention out, fc1, fc2 (the smallest, attention out, holds D x D / 8 bf16 numbers)."""
    _, traffic = compiled_step
    weights = traffic.inside(M, L).over("fsdp").of_at_least(2 * D * D // 8)
    assert weights.forward().count("all-gather") == 4 * M * L
    assert weights.backward().count("all-gather") == 4 * M * L
    assert weights.backward().count("reduce-scatter") == 4 * M * L
    assert weights.total_bytes() == 3 * M * L * (2 * 12 * D * D // 8)


@needs_compiler
def test_gradients_cross_data_once_a_step(compiled_step):
    state, traffic = compiled_step
    data = traffic.over("data")
    assert data == data.inside()
    local = sum(prod(leaf.sharding.shard_shape(leaf.shape)) for leaf in jax.tree.leaves(state.params))
    assert data.total_bytes() == 4 * local + 4 + 4  # fp32; and the loss, and the number of tokens
    assert data.count("all-reduce") == len(data)


@needs_compiler
@pytest.mark.parametrize(
    ("preset", "words"),
    [
        ("llama3.1_8b", "parallel.tensor=8"),  # gated: fc1 is [D, 2, F]; grouped: qkv is [D, K, 6, H]
        ("qwen2_7b", "parallel.tensor=4 parallel.fsdp=2 train.global_batch_size=4"),  # with biases [K, 9, H]
        ("bert_large", "parallel.tensor=4 data.seq_length=512"),  # norms after the sums, whose inputs are kept
    ],
)
def test_no_layer_gathers_a_weight_over_tensor(preset: str, words: str):
    """Whatever the dims of a weight, its cut one included: [S, D] alone crosses `tensor`, as often as GPT's."""
    layers, microbatches = 3, 2
    fixed = f"model.num_layers={layers} data.seq_length=2048 train.global_batch_size=2 train.micro_batch_size=1"
    config = published(preset, f"{fixed} {words}")
    compiled = compile_step(config, "H100")
    in_layers = collectives(compiled.step, compiled.rules.mesh).inside(microbatches, layers)
    stream = 2 * config.data.seq_length * config.model.hidden_size
    residual = in_layers.over("tensor").of_at_least(stream // 8)
    assert {(record.axes, record.bytes) for record in residual} == {(("tensor",), stream)}
    runs = microbatches * layers
    assert residual.forward().count("all-gather") == residual.forward().count("reduce-scatter") == 2 * runs
    assert residual.backward().count("all-gather") == 4 * runs
    assert residual.backward().count("reduce-scatter") == 2 * runs


@needs_compiler
def test_zero_1_keeps_what_fsdp_cuts_cut():
    """Once a step gradients are scattered over `data` and weights gathered, a layer's share of `fsdp` at a time.

    Between the two orders of cutting, pieces change hands: each device sends one to one other.
    """
    words = "parallel.data=2 parallel.fsdp=4 parallel.zero=1 model.num_layers=3 train.micro_batch_size=1"
    config = published("llama3.1_8b", f"{words} data.seq_length=2048 train.global_batch_size=16")
    compiled = compile_step(config, "H100")
    held = sum(prod(leaf.sharding.shard_shape(leaf.shape)) for leaf in jax.tree.leaves(compiled.state.params))
    once = collectives(compiled.step, compiled.rules.mesh).over("data").of_at_least(2**20)
    assert once == once.inside()
    together = once.over("fsdp")
    assert together.count("collective-permute") == len(together)
    assert together.total_bytes() == pytest.approx((4 + 2) * held, rel=0.01)  # fp32 gradients, bf16 weights
    alone = once.where(lambda record: record.axes == ("data",))
    assert {record.op for record in alone} == {"reduce-scatter", "all-gather"}
    assert alone.total_bytes() == pytest.approx((4 + 2) * 2 * held, rel=0.01)
