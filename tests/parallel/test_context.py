"""Context parallelism: zig-zag order, and attention over parts of the sequence."""

from __future__ import annotations

from dataclasses import replace

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megajax.config import DataConfig, ParallelConfig, TrainConfig
from megajax.parallel.context import in_true_order, token_order
from tests.harness import BATCH, GPT, LLAMA, Outcome, tiny_config, train_layout, worst

pytestmark = pytest.mark.slow

PACKED = DataConfig(seq_length=16, reset_attention=True, reset_positions=True, mask_eod_loss=True)
"""Documents that do not see each other, with positions and loss masks of their own: seams everywhere."""
DROPOUT = replace(GPT, hidden_dropout=0.1, attention_dropout=0.1)
LAYOUTS = {
    "context-2": ({"data": 1, "context": 2}, 8),
    "context-4-data-2": ({"data": 2, "context": 4}, 4),
    "context-2-fsdp-2-tensor-2": ({"data": 1, "fsdp": 2, "context": 2, "tensor": 2}, 1),
    "pipe-2-context-2-tensor-2": ({"data": 1, "pipe": 2, "context": 2, "tensor": 2}, 2),
}


def test_zig_zag_by_hand() -> None:
    """Two shards of eight tokens: pieces 0 and 3, then 1 and 2."""
    assert token_order(8, 2).tolist() == [0, 1, 6, 7, 2, 3, 4, 5]
    assert token_order(8, 1).tolist() == list(range(8))


@given(st.integers(1, 8), st.integers(1, 4))
def test_zig_zag_balances_causal_work(shards: int, size: int) -> None:
    """Every shard's tokens see as many keys as any other's, and the order can be undone."""
    length = 2 * shards * size
    order = token_order(length, shards)
    seen = (order + 1).reshape(shards, -1).sum(axis=1)
    assert len(set(seen.tolist())) == 1
    np.testing.assert_array_equal(in_true_order(jnp.asarray(order)[None], shards)[0], np.arange(length))


@pytest.fixture(scope="module")
def one_device() -> dict[str, Outcome]:
    """The two models on one device."""
    return {
        "gpt-dropout": train_layout(tiny_config(DROPOUT, BATCH), ParallelConfig(data=1), steps=3),
        "llama-packed": train_layout(tiny_config(LLAMA, BATCH, data=PACKED), ParallelConfig(data=1), steps=3),
    }


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("model", ["gpt-dropout", "llama-packed"])
def test_gathered_keys_compute_the_same(one_device: dict[str, Outcome], model: str, layout: str) -> None:
    """Causal and document-masked attention, rotary and learned positions, dropout on probabilities."""
    sizes, micro = LAYOUTS[layout]
    config = tiny_config(DROPOUT, micro) if model == "gpt-dropout" else tiny_config(LLAMA, micro, data=PACKED)
    assert_same(train_layout(config, ParallelConfig(**sizes), steps=3), one_device[model])


@pytest.mark.parametrize("layout", LAYOUTS)
def test_ring_computes_the_same(one_device: dict[str, Outcome], layout: str) -> None:
    """Keys and values sent round instead of gathered."""
    sizes, micro = LAYOUTS[layout]
    train = TrainConfig(steps=5, global_batch_size=BATCH, micro_batch_size=micro, attention="ring")
    config = tiny_config(LLAMA, data=PACKED, train=train)
    assert_same(train_layout(config, ParallelConfig(**sizes), steps=3), one_device["llama-packed"])


def assert_same(outcome: Outcome, one: Outcome) -> None:
    """The yardstick of all layouts."""
    difference, name = worst(outcome.first_gradients, one.first_gradients)
    assert difference < 1e-5, name
    np.testing.assert_allclose(outcome.losses, one.losses, rtol=5e-6)
