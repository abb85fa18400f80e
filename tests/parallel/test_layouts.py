"""One program has under every layout the same bits at the start, and then the same gradients and losses up to rounding.

The layouts are a sample of those that `python -m megajax.verify` runs one by one; context parallelism has its own
tests.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from megajax.config import OptimConfig, ParallelConfig
from megajax.planning.equivalence import compare
from tests.harness import GPT, LLAMA, Outcome, tiny_config, train_layout

pytestmark = pytest.mark.slow

DROPOUT = replace(GPT, num_layers=4, hidden_dropout=0.1, attention_dropout=0.1)
NINE = replace(LLAMA, num_layers=4, num_heads=9, num_kv_heads=3, hidden_size=72)
GEMMA = replace(
    LLAMA, num_layers=8, window=5, layer_pattern=("local", "global"), rope_local_base=100.0, attention_softcap=2.0,
    logit_softcap=3.0, norm_plus_one=True, branch_norm=True, embedding_scale=True, qk_norm=True, tied_head=True,
    hidden_dropout=0.1,
)  # fmt: skip
MODELS = {
    "gemma": GEMMA,
    "gpt": DROPOUT,
    "llama": replace(LLAMA, num_layers=4),
    "nine": NINE,
    "odd": replace(GPT, max_positions=33),
}
OPTIM = OptimConfig(lr=1e-3, decay_style="constant", weight_decay=0.1)
LAYOUTS = {
    # model and name: (mesh, micro batch size); 8 samples a step, so accumulation is 8 / (micro x data x fsdp)
    "gpt accumulate-4": ({}, 2),
    "gpt fsdp-8": ({"fsdp": 8}, 1),
    "gpt tensor-8": ({"tensor": 8}, 8),
    "gpt data-2 fsdp-2 tensor-2 accumulate-2": ({"data": 2, "fsdp": 2, "tensor": 2}, 1),
    "llama data-4 tensor-2 zero no-sequence-parallel": (
        {"data": 4, "tensor": 2, "zero": 1, "sequence_parallel": False}, 1
    ),
    "llama data-2 fsdp-4 zero": ({"data": 2, "fsdp": 4, "zero": 1}, 1),
    "llama pipe-4": ({"pipe": 4}, 1),
    "gpt pipe-2 chunks-2 data-2 tensor-2": ({"pipe": 2, "chunks": 2, "data": 2, "tensor": 2}, 1),
    "llama data-8": ({"data": 8}, 1),
    "llama data-2 fsdp-2 tensor-2": ({"data": 2, "fsdp": 2, "tensor": 2}, 2),
    "llama pipe-2": ({"pipe": 2}, 2),
    "llama pipe-2 fsdp-2 tensor-2": ({"pipe": 2, "fsdp": 2, "tensor": 2}, 1),
    "nine pipe-2 tensor-2 whole-heads": ({"pipe": 2, "tensor": 2, "whole_heads": True}, 2),
    "odd fsdp-2 tensor-4": ({"fsdp": 2, "tensor": 4}, 4),
    "odd pipe-2 tensor-2 no-sequence-parallel": ({"pipe": 2, "tensor": 2, "sequence_parallel": False}, 2),
    "gemma pipe-2 fsdp-2 tensor-2": ({"pipe": 2, "fsdp": 2, "tensor": 2}, 1),
    "gemma pipe-2 chunks-2": ({"pipe": 2, "chunks": 2}, 2),
    "gemma data-2 context-2 tensor-2": ({"data": 2, "context": 2, "tensor": 2}, 2),
    "llama pipe-2 chunks-2 data-2 zero": ({"pipe": 2, "chunks": 2, "data": 2, "zero": 1}, 2),
}  # fmt: skip


@pytest.fixture(scope="module")
def reference() -> dict[str, Outcome]:
    """Each model on one device, without accumulation."""
    return {
        name: train_layout(tiny_config(model, 8, optim=OPTIM), ParallelConfig(data=1)) for name, model in MODELS.items()
    }


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_computes_the_same(reference: dict[str, Outcome], layout: str) -> None:
    """Losses, gradients and norms of one device."""
    sizes, micro = LAYOUTS[layout]
    model = layout.split(maxsplit=1)[0]
    outcome = train_layout(tiny_config(MODELS[model], micro, optim=OPTIM), ParallelConfig(**({"data": 1} | sizes)))
    assert compare(outcome, reference[model]).departures == ()
    np.testing.assert_allclose(outcome.norms, reference[model].norms, rtol=1e-4)


def test_dropout_matters_and_depends_on_the_seed(reference: dict[str, Outcome]) -> None:
    """Otherwise the test above would compare models without dropout."""
    config = tiny_config(DROPOUT, 8)
    without = tiny_config(replace(GPT, num_layers=4), 8)
    for other in (without, replace(config, train=replace(config.train, seed=7))):
        loss = train_layout(other, ParallelConfig(data=1), steps=1).losses[0]
        assert abs(loss - reference["gpt"].losses[0]) > 1e-4
