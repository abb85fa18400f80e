"""Batch sizes ramp up as with Megatron-LM's --rampup-batch-size."""

from hypothesis import given
from hypothesis import strategies as st

from megajax.config.train import TrainConfig
from megajax.training.batch_size import BatchSizeRamp

# 16 -> 32 in two increments of 8 over 96 samples: one increment every 48 samples.
RAMP = BatchSizeRamp(start=16, increment=8, ramp_samples=96, final=32)


def test_batch_size_over_the_ramp():
    sizes = {consumed: RAMP.batch_size_at(consumed) for consumed in (0, 47, 48, 95, 96, 97, 10_000)}
    assert sizes == {0: 16, 47: 16, 48: 24, 95: 24, 96: 32, 97: 32, 10_000: 32}
    assert RAMP.sizes == (16, 24, 32)


def test_steps_by_simulation():
    # Steps start after 0, 16, 32 (16 each), 48, 72 (24 each), 96, 128, ... (32 each) samples.
    assert RAMP.steps_for_samples(48) == 3
    assert RAMP.steps_for_samples(96) == 5
    assert RAMP.steps_for_samples(96 + 3 * 32) == 8
    assert RAMP.steps_for_samples(96 + 3 * 32 + 31) == 8
    assert RAMP.steps_for_samples(15) == 0


def test_gpt3_ramp():
    """The 175B example of Megatron-LM: 16 16 5859375 with global batch size 1536, 95 increments."""
    ramp = BatchSizeRamp.from_config(
        TrainConfig(samples=146_484_375, global_batch_size=1536, rampup=(16, 16, 5_859_375))
    )
    assert len(ramp.sizes) == 96
    assert ramp.batch_size_at(61_677) == 16 and ramp.batch_size_at(61_678) == 32
    assert ramp.batch_size_at(5_859_376) == 1536


def test_without_a_ramp_the_size_is_constant():
    ramp = BatchSizeRamp.from_config(TrainConfig(steps=5, global_batch_size=8))
    assert ramp.sizes == (8,)
    assert {ramp.batch_size_at(consumed) for consumed in range(100)} == {8}
    assert ramp.steps_for_samples(41) == 5


@given(start=st.integers(1, 8), increment=st.integers(1, 8), k=st.integers(0, 5), ramp=st.integers(1, 500))
def test_matches_megatron_formula_and_step_count(start, increment, k, ramp):
    final = start + k * increment
    sizes = BatchSizeRamp(start, increment, ramp, final)
    consumed = steps = 0
    while consumed + (size := sizes.batch_size_at(consumed)) <= 600:
        assert size in sizes.sizes
        if k and ramp % k == 0 and consumed <= ramp:
            assert size == min(final, start + consumed // (ramp // k) * increment)
        consumed, steps = consumed + size, steps + 1
    assert sizes.steps_for_samples(600) == steps
