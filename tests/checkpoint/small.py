"""Small states, and checkpoints of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from megajax.checkpoint.store import Checkpoints
from megajax.config import CheckpointConfig

State = dict[str, jax.Array]


def small_state(value: float, size: int = 4) -> State:
    """A state of two arrays."""
    return {"weight": jnp.full((size,), value), "count": jnp.int32(value)}


def shardings(state: State) -> Any:
    """Everything on the first device."""
    return jax.tree.map(lambda _: jax.sharding.SingleDeviceSharding(jax.devices()[0]), state)


def restored_step(checkpoints: Checkpoints, step: int | None = None) -> int:
    """Restore a small state; both arrays have to hold the step of its record."""
    like = small_state(0)
    state, record = checkpoints.restore(like, shardings(like), step)
    np.testing.assert_array_equal(state["weight"], np.full(4, record["step"]))
    assert state["count"] == record["step"]
    return record["step"]


def save_steps(directory: Path | str, steps: list[int], **config: Any) -> None:
    """Save small states, each holding its step number."""
    with Checkpoints(directory, CheckpointConfig(**config)) as checkpoints:
        for step in steps:
            checkpoints.save(step, small_state(step), {"step": step})
