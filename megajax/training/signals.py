"""Signals to a running job, and their exchange between its processes, so that all stop after the same step.

SIGTERM, Ctrl-C and a time limit ask a run to save and leave, SIGUSR1 asks it to save and go on. A signal reaches each
process at another moment, or only one of them. So each process sends a row of numbers in a tiny all-gather after every
step, and reads all rows of the step before. Every process then sees the same table at the same step and decides the
same, without waiting for the others.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Sequence
from enum import IntEnum
from types import FrameType, TracebackType
from typing import Any, Self

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from megajax.processes import in_turn


class Request(IntEnum):
    """A request to the run; the largest of several counts, so that processes agree on the maximum."""

    NOTHING = 0
    SIGUSR1 = 1
    TIME_LIMIT = 2
    SIGTERM = 3
    SIGINT = 4

    @property
    def stops(self) -> bool:
        """Tell whether the run is to end."""
        return self >= Request.TIME_LIMIT

    def __str__(self) -> str:
        return "train.exit_duration" if self is Request.TIME_LIMIT else self.name


class Requests:
    """Note the three signals while the block runs instead of acting on them; a second Ctrl-C leaves at once."""

    def __init__(self, minutes: float | None) -> None:
        """Begin without a request; the time limit, in minutes, counts from here."""
        self._noted = Request.NOTHING
        self._limit = None if minutes is None else time.monotonic() + 60 * minutes
        self._previous: dict[signal.Signals, Any] = {}

    def take(self) -> Request:
        """Return the request to this process; a request to save is returned once, a request to stop stays."""
        if self._limit is not None and time.monotonic() >= self._limit:
            self._noted = max(self._noted, Request.TIME_LIMIT)
        taken = self._noted
        if not taken.stops:
            self._noted = Request.NOTHING
        return taken

    def __enter__(self) -> Self:
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
            self._previous[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self._noted is Request.SIGINT and number == signal.SIGINT:
            raise KeyboardInterrupt
        self._noted = max(self._noted, Request[signal.Signals(number).name])


class Pulse:
    """Gather tables [processes, columns]; every process has to beat equally often."""

    def __init__(self) -> None:
        """Gather over all devices of the run."""
        devices = sorted(jax.devices(), key=lambda device: (device.process_index, device.id))
        mesh = Mesh(np.array(devices).reshape(jax.process_count(), -1), ("process", "device"))
        self._rows = NamedSharding(mesh, PartitionSpec("process"))
        self._gather = jax.jit(lambda rows: rows, out_shardings=NamedSharding(mesh, PartitionSpec()))
        self._held: jax.Array | None = None

    def beat(self, row: Sequence[float], wait: bool = False) -> np.ndarray | None:
        """Send this process's row.

        Returns:
            Tables [beats, processes, columns]: that of the beat before, unless it has been waited for, and with `wait`
            that of this beat; None if there is none.
        """
        mine = np.array([row], np.float32)
        if jax.process_count() == 1:
            return mine[None]
        rows = jax.make_array_from_process_local_data(self._rows, mine, (jax.process_count(), len(row)))
        before, now = self._held, in_turn(self._gather(rows))
        self._held = None if wait else now
        ready = [beat for beat in (before, now if wait else None) if beat is not None]
        return np.stack([np.asarray(beat) for beat in ready]) if ready else None
