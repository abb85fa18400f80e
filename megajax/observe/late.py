"""Reading a step's metrics one step late: the device never waits for a log line.

`float(loss)` right after dispatching a step blocks Python until that step ends, and the device then idles until Python
has dispatched the next one. Read while the next step runs, the same numbers are free.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import jax


@dataclass(frozen=True)
class StepMetrics:
    """Scalars of one finished step and its place in the run."""

    step: int
    """Counted from 1."""
    samples: int
    """Consumed since the start of the run, this step included."""
    batch_size: int
    """Samples of this step."""
    scalars: dict[str, float]


class LateMetrics:
    """Holds back the newest step, so that reading the one before does not wait for it."""

    def __init__(self) -> None:
        self._held: tuple[int, int, int, Mapping[str, jax.Array]] | None = None

    def push(self, step: int, samples: int, batch_size: int, scalars: Mapping[str, jax.Array]) -> StepMetrics | None:
        """Hold the step just dispatched (replicated device scalars); return the one before, None at first."""
        for scalar in scalars.values():
            scalar.copy_to_host_async()
        ready, self._held = self.pop(), (step, samples, batch_size, scalars)
        return ready

    def pop(self) -> StepMetrics | None:
        """Wait for the step that is held back and return it; None if there is none."""
        if self._held is None:
            return None
        step, samples, batch_size, scalars = self._held
        self._held = None
        return StepMetrics(step, samples, batch_size, {name: float(value) for name, value in scalars.items()})
