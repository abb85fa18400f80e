"""One device's share of a step, compared with numbers by hand."""

from dataclasses import replace

from megajax.config import Config, DataConfig, ModelConfig, ParallelConfig, TrainConfig
from megajax.costs.device import Device

CONFIG = Config(
    model=ModelConfig(num_layers=12, hidden_size=64, num_heads=8, num_kv_heads=4, vocab_size=100),
    data=DataConfig(seq_length=32),
    train=TrainConfig(micro_batch_size=2, global_batch_size=96, precision="bf16"),
    parallel=ParallelConfig(pipe=2, chunks=3, data=2, fsdp=3, expert=4, context=2, tensor=4),
)
DEVICE = Device.of(CONFIG)


def test_a_batch_is_shared_over_data_fsdp_and_expert() -> None:
    """96 samples over 2 x 3 x 4 replicas are 4 each, two micro batches of two samples."""
    assert (DEVICE.samples, DEVICE.microbatches) == (4, 2)
    assert DEVICE.schedule.microbatches == 2 and DEVICE.schedule.chunks == 3
    assert Device(CONFIG, DEVICE.mesh | {"data": 4}).microbatches == 1  # the mesh counts, not the configuration


def test_a_micro_batch_is_cut_over_context_and_tensor() -> None:
    assert DEVICE.tokens(32) == 2 * 32 / 2
    assert DEVICE.stream(32) == 32 * 64 * 2  # bf16
    assert DEVICE.stream_ways == 4
    assert (DEVICE.heads, DEVICE.kv_heads) == (2, 1)


def test_what_is_not_cut() -> None:
    parallel = replace(CONFIG.parallel, whole_heads=True, sequence_parallel=False)
    whole = Device.of(replace(CONFIG, parallel=parallel, train=replace(CONFIG.train, precision="fp32")))
    assert (whole.heads, whole.kv_heads, whole.stream_ways, whole.width) == (8, 4, 1, 4)


def test_layers_of_the_fullest_stage() -> None:
    assert DEVICE.layers == 6
    uneven = replace(CONFIG, model=replace(CONFIG.model, num_layers=13))  # three layers a chunk, where there are
    assert Device.of(uneven).layers == 9


def test_members_of_a_group_are_as_far_apart_as_the_axes_inside_are_large() -> None:
    assert [DEVICE.stride(axis) for axis in ("tensor", "context", "expert", "pipe")] == [1, 4, 8, 2 * 3 * 4 * 2 * 4]
