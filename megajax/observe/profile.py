"""Profiles: a window of steps recorded by JAX's profiler, for TensorBoard or XProf."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import jax

from megajax.config.base import InputError
from megajax.config.config import ProfileConfig


class ProfileWindow:
    """Record steps `profile.start` to `profile.stop` of process 0, as a context manager that ends a recording at its
    exit.

    with ProfileWindow(config.profile, directory) as profile:
        for step in ...:
            with profile.step(step, state):
                state, metrics = train_step(state, batch)
    """

    def __init__(self, config: ProfileConfig, directory: Path) -> None:
        """Prepare the window; nothing is written before it opens.

        Raises:
            InputError: the window is empty.
        """
        start, stop = config.start, config.stop
        if stop is not None and (start is None or stop < start):
            raise InputError(
                f"profile.stop {stop} needs a profile.start up to it, which is {start or 'unset'}: set both"
            )
        self._directory = directory
        self._steps = range(0)
        if start is not None and jax.process_index() == 0:
            self._steps = range(start, (stop or start + 2) + 1)
        self._running = False

    @contextmanager
    def step(self, step: int, state: Any) -> Iterator[None]:
        """Mark the block as the dispatch of `step`.

        Args:
            step: number of the step, counted from 1.
            state: result of the step before, waited for at the edges of the window, because steps run behind the host.
        """
        inside = step in self._steps
        if inside != self._running:
            jax.block_until_ready(state)
            if inside:
                self._running = True
                jax.profiler.start_trace(self._directory)
            else:
                self.close()
        with jax.profiler.StepTraceAnnotation("train", step_num=step):
            yield

    def close(self) -> None:
        """Write the trace, if one is being recorded, and tell how to look at it."""
        if self._running:
            self._running = False
            jax.profiler.stop_trace()
            print(f"profile written: pip install xprof && xprof --logdir={self._directory}", flush=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()
