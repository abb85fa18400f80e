"""Encoders, encoder-decoders and mixtures under layouts that are hard for the parts that a dense decoder lacks.

The first token may be on any device, heads have a bias that is cut like the vocabulary, a table of positions that does
not divide over tensor is whole on every shard, cross-attention reads a second sequence, and experts are on devices with
other samples. `python -m megajax.verify` runs more layouts.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest

from megajax.config import Config, ParallelConfig, load_config
from megajax.planning.equivalence import Outcome, comparable, compare
from tests.harness import train_layout

pytestmark = pytest.mark.slow

LAYOUTS = {
    "bert_tiny pipe-2 context-2 tensor-2": {"pipe": 2, "context": 2, "tensor": 2},
    "bert_tiny data-2 fsdp-2 tensor-2 zero": {"data": 2, "fsdp": 2, "tensor": 2, "zero": 1},
    "t5_tiny data-2 fsdp-2 tensor-2 zero": {"data": 2, "fsdp": 2, "tensor": 2, "zero": 1},
    "mixtral_tiny data-2 expert-2 tensor-2 zero": {"data": 2, "expert": 2, "tensor": 2, "zero": 1},
    "mixtral_tiny expert-4 tensor-2": {"expert": 4, "tensor": 2, "sequence_parallel": False},
    "mixtral_tiny pipe-2 expert-2 fsdp-2": {"pipe": 2, "expert": 2, "fsdp": 2},
}


def shallow(name: str) -> Config:
    """Two layers of the model that `megajax.verify` compares."""
    config, _ = comparable(load_config(f"verify/{name}.yaml").config, devices=8)
    encoder = 1 if config.model.family == "t5" else None
    offset = 1 if config.model.family == "bert" else 0  # like RoBERTa's: 33 rows, which divide over nothing
    return replace(config, model=replace(config.model, num_layers=2, encoder_layers=encoder, position_offset=offset))


@cache
def reference(name: str) -> Outcome:
    config = shallow(name)
    config = replace(config, train=replace(config.train, micro_batch_size=config.train.global_batch_size))
    return train_layout(config, ParallelConfig(data=1), steps=2)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_computes_the_same(layout: str) -> None:
    name = layout.partition(" ")[0]
    outcome = train_layout(shallow(name), ParallelConfig(**({"data": 1} | LAYOUTS[layout])), steps=2)
    assert compare(outcome, reference(name)).departures == ()
