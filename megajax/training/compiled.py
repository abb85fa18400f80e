"""The training step, compiled ahead for every batch size that the run meets, so that its memory is known."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import jax

from megajax.in_turn import in_turn
from megajax.models.model import Batch
from megajax.observe.memory import planned_bytes
from megajax.training.state import TrainState


class CompiledStep:
    """f(state, batch) -> (state, metrics), as `build_train_step` gives it."""

    def __init__(self, step: Any, compiling: Callable[[], AbstractContextManager[None]]) -> None:
        """`compiling()` is a context for the time that a compilation takes."""
        self._step, self._compiling = step, compiling
        self._compiled: dict[tuple[int, ...], jax.stages.Compiled] = {}

    def __call__(self, state: TrainState, batch: Batch) -> tuple[TrainState, dict[str, jax.Array]]:
        """Take a step; the state is donated."""
        shape = batch["tokens"].shape
        if shape not in self._compiled:
            with self._compiling():
                self._compiled[shape] = self._step.lower(state, batch).compile()
        return in_turn(self._compiled[shape](state, batch))

    @property
    def sizes(self) -> int:
        """Batch sizes that were compiled."""
        return len(self._compiled)

    @property
    def planned_bytes(self) -> int:
        """Largest memory of one device that XLA has planned for a step."""
        return max(planned_bytes(compiled) for compiled in self._compiled.values())
