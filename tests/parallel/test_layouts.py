"""One program, every layout: the same bits at the start, the same gradients and losses after up to rounding."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from megajax.config import ParallelConfig
from tests.harness import GPT, LLAMA, Outcome, tiny_config, train_layout, worst

DROPOUT = replace(GPT, hidden_dropout=0.1, attention_dropout=0.1)
MODELS = {"gpt": GPT, "gpt-dropout": DROPOUT, "llama": LLAMA}
MIXED = {"data": 2, "fsdp": 2, "tensor": 2}
LAYOUTS = {
    # name: (mesh, micro batch size); 8 samples a step, so accumulation is 8 / (micro x data x fsdp)
    "accumulate-2": ({"data": 1}, 4),
    "accumulate-4": ({"data": 1}, 2),
    "data-8": ({"data": 8}, 1),
    "fsdp-8": ({"data": 1, "fsdp": 8}, 1),
    "tensor-8": ({"data": 1, "tensor": 8}, 8),
    "data-2-fsdp-2-tensor-2": (MIXED, 2),
    "data-2-fsdp-2-tensor-2-accumulate-2": (MIXED, 1),
    "data-2-fsdp-2-tensor-2-no-sequence-parallel": (MIXED | {"sequence_parallel": False}, 2),
}


@pytest.fixture(scope="module")
def reference() -> dict[str, Outcome]:
    """Each model on one device, without accumulation."""
    return {name: train_layout(tiny_config(model, 8), ParallelConfig(data=1)) for name, model in MODELS.items()}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("model", MODELS)
def test_every_layout_computes_the_same(reference: dict[str, Outcome], model: str, layout: str) -> None:
    """Cases C13, C15 and C17: losses, gradients and norms of one device."""
    sizes, micro = LAYOUTS[layout]
    if MODELS[model].kv_heads % sizes.get("tensor", 1):
        sizes = sizes | {"tensor": 2, "data": 4}
        micro = 2
    outcome, one = train_layout(tiny_config(MODELS[model], micro), ParallelConfig(**sizes)), reference[model]
    for name, value in one.initial.items():
        np.testing.assert_array_equal(outcome.initial[name], value, err_msg=name)
    gradients, name = worst(outcome.first_gradients, one.first_gradients)
    assert gradients < 1e-5, name
    np.testing.assert_allclose(outcome.losses, one.losses, rtol=5e-6)
    np.testing.assert_allclose(outcome.norms, one.norms, rtol=1e-4)


def test_dropout_matters_and_depends_on_the_seed(reference: dict[str, Outcome]) -> None:
    """Otherwise the test above would compare models without dropout."""
    with_dropout, without = reference["gpt-dropout"].losses[0], reference["gpt"].losses[0]
    assert abs(with_dropout - without) > 1e-4
    config = tiny_config(DROPOUT, 8)
    config = replace(config, train=replace(config.train, seed=7))
    assert abs(train_layout(config, ParallelConfig(data=1), steps=1).losses[0] - with_dropout) > 1e-4
