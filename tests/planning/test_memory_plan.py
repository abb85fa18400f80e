"""Memory in closed form."""

from __future__ import annotations

from dataclasses import replace

import pytest

from megajax.config import Config, DataConfig, ModelConfig, ParallelConfig, TrainConfig
from megajax.config.parallel import AXES
from megajax.models.sizes import parameter_count
from megajax.planning.memory import describe_logits, logits_bytes, state_bytes

ONE = dict.fromkeys(AXES, 1)
LARGE = Config(
    model=ModelConfig(vocab_size=128_256, max_positions=4096),
    data=DataConfig(seq_length=4096),
    train=TrainConfig(micro_batch_size=32, global_batch_size=32),
)


def test_logits_of_a_large_batch() -> None:
    """Case X05: 32 x 4096 x 128,256 fp32 numbers on one 80 GB device."""
    assert logits_bytes(LARGE, ONE) == 67_243_081_728
    text = describe_logits(LARGE, ONE, 80e9)
    assert "67,243,081,728 bytes for a whole micro batch" in text
    assert "and as many for their gradient, do not fit in 74.5 GiB" in text
    assert "smaller train.micro_batch_size" in text
    assert text.startswith("in chunks of 0.125 GiB a device")


def test_logits_are_cut_over_context_stages_and_tensor() -> None:
    assert logits_bytes(LARGE, ONE | {"context": 2, "pipe": 2, "tensor": 4}) == 67_243_081_728 // 16


@pytest.mark.parametrize(("zero", "bytes_per_parameter"), [(0, 16 / 8), (1, 12 / 16 + 4 / 8)])
def test_state_of_a_device(zero: int, bytes_per_parameter: float) -> None:
    """AdamW: 12 bytes at rest, 4 of gradients; pipe 2 x fsdp 2 x tensor 2, ZeRO-1 over data 2 cuts the 12 once more."""
    config = replace(LARGE, parallel=ParallelConfig(zero=zero))
    mesh = ONE | {"pipe": 2, "fsdp": 2, "tensor": 2, "data": 2}
    assert state_bytes(config, mesh) == pytest.approx(parameter_count(config.model) * bytes_per_parameter)
