"""Which checkpoints stay."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megajax.checkpoint.directory import kept
from megajax.config import CheckpointConfig


@pytest.mark.parametrize(
    ("config", "losses", "expected"),
    [
        ({"keep_last": 2}, {}, {30, 40}),
        ({"keep_last": 1, "keep_every": 20}, {}, {20, 40}),
        ({"keep_last": 2, "keep_best": True}, {10: 3.0, 20: 1.0, 30: 2.0, 40: 2.5}, {20, 40}),
        ({"keep_last": 2, "keep_best": True}, {10: 3.0, 20: 2.0, 30: 1.5, 40: 1.0}, {30, 40}),
        ({"keep_last": 2, "keep_best": False}, {20: 1.0}, {30, 40}),
        ({"keep_last": 1, "keep_best": True}, {20: 1.0}, {20, 40}),
        ({"keep_last": 1, "keep_best": True}, {20: 1.0, 40: 0.5}, {40}),
        ({"keep_last": 1, "keep_best": True}, {20: math.nan}, {40}),
        ({"keep_last": 1, "keep_best": True}, {15: 0.5, 20: 1.0}, {20, 40}),  # 15 was evaluated, not saved
        ({"keep_last": 3, "keep_best": True, "keep_every": 10}, {10: 1.0}, {10, 20, 30, 40}),
    ],
)
def test_by_hand(config: dict, losses: dict[int, float], expected: set[int]) -> None:
    """Cases K07 and K09: the best takes the place of one of the newest, the newest always stays."""
    assert kept([10, 20, 30, 40], CheckpointConfig(**config), losses) == expected


@given(
    steps=st.sets(st.integers(0, 200), min_size=1),
    last=st.integers(1, 5),
    losses=st.dictionaries(st.integers(0, 200), st.floats(allow_nan=True)),
)
def test_the_newest_and_the_best_always_stay(steps: set[int], last: int, losses: dict[int, float]) -> None:
    keep = kept(steps, CheckpointConfig(keep_last=last, keep_best=True), losses)
    assert max(steps) in keep <= steps
    assert len(keep) <= max(last, 2)
    rated = {step: losses[step] for step in steps if math.isfinite(losses.get(step, math.nan))}
    if rated:
        assert min(rated.values()) in {rated[step] for step in keep & rated.keys()}
