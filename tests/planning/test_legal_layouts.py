"""Legal layouts, counted by hand."""

from dataclasses import replace

import pytest

from megajax.config import Config, DataConfig, ModelConfig, TrainConfig
from megajax.planning.layouts import layout_name, legal_layouts

MODEL = ModelConfig(num_layers=2, hidden_size=16, num_heads=2, max_positions=8, vocab_size=100)
CONFIG = Config(model=MODEL, data=DataConfig(seq_length=8), train=TrainConfig(global_batch_size=4, remat="full"))


def names(config: Config, devices: int) -> list[str]:
    return [layout_name(layout) for layout in legal_layouts(config, devices)]


def test_two_devices():
    assert names(CONFIG, 2) == [
        "tensor=2 sequence=on remat=full microbatches=4",
        "tensor=2 sequence=off remat=full microbatches=4",
        "context=2 remat=full microbatches=4",
        "fsdp=2 remat=full microbatches=2",
        "data=2 remat=full microbatches=2",
        "data=2 zero=1 remat=full microbatches=2",
        "pipe=2 remat=full microbatches=4",
    ]


def test_interleaved_pipelines():
    """8 layers on 4 stages can be 2 chunks of one layer each, if the microbatches fill groups of 4."""
    model = replace(MODEL, num_layers=8)
    pipelines = [name for name in names(replace(CONFIG, model=model), 4) if "pipe=4" in name]
    assert pipelines == ["pipe=4 remat=full microbatches=4", "pipe=4 chunks=2 remat=full microbatches=4"]
    few = replace(CONFIG, model=model, train=replace(CONFIG.train, micro_batch_size=2))
    assert [name for name in names(few, 4) if "pipe=4" in name] == ["pipe=4 remat=full microbatches=2"]


@pytest.mark.parametrize(
    ("change", "gone"),
    [
        ({"model": replace(MODEL, num_layers=3)}, "pipe"),
        ({"model": replace(MODEL, num_kv_heads=1)}, "tensor"),
        ({"model": replace(MODEL, head_dim=8, hidden_size=15)}, "fsdp"),
        ({"data": DataConfig(seq_length=6)}, "context"),
        ({"train": TrainConfig(global_batch_size=3)}, "data"),
    ],
)
def test_what_does_not_divide_is_left_out(change: dict, gone: str):
    left = names(replace(CONFIG, **change), 2)
    assert left
    assert not [name for name in left if f"{gone}=2" in name]


def test_the_vocabulary_excludes_no_layout():
    """128 rows are no multiple of 3, but are padded to be one; 8 tokens are not, so no sequence parallelism."""
    model = replace(MODEL, num_heads=3, hidden_size=24, num_layers=1, max_positions=9)
    config = replace(CONFIG, model=model)
    assert names(config, 3) == ["tensor=3 sequence=off remat=full microbatches=4"]


def test_the_micro_batch_shrinks_to_the_samples_of_a_replica():
    layouts = legal_layouts(replace(CONFIG, train=TrainConfig(global_batch_size=8, micro_batch_size=4)), 4)
    sizes = {layout.parallel.data * layout.parallel.fsdp: layout.train.micro_batch_size for layout in layouts}
    assert sizes == {1: 4, 2: 4, 4: 2}


def test_thousands_of_devices_need_none():
    config = replace(CONFIG, model=replace(MODEL, hidden_size=1024), train=TrainConfig(global_batch_size=512))
    assert names(config, 1024)[-1] == "pipe=2 data=512 zero=1 remat=selective microbatches=1"
