"""What the processes of a run tell each other at every step: one row of numbers each, gathered on the devices.

A signal reaches one process, at a moment of its own; all have to stop after the same step. So each sends its row in a
tiny all-gather behind every step, and reads all rows of the step before: every process sees the same table at the same
step and decides the same, without waiting for the others and without messages of its own.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from megajax.in_turn import in_turn


class Pulse:
    """Gathers tables [processes, columns]; every process has to beat as often."""

    def __init__(self) -> None:
        """Over all devices of the run."""
        devices = sorted(jax.devices(), key=lambda device: (device.process_index, device.id))
        mesh = Mesh(np.array(devices).reshape(jax.process_count(), -1), ("process", "device"))
        self._rows = NamedSharding(mesh, PartitionSpec("process"))
        self._gather = jax.jit(lambda rows: rows, out_shardings=NamedSharding(mesh, PartitionSpec()))
        self._held: jax.Array | None = None

    def beat(self, row: Sequence[float], wait: bool = False) -> np.ndarray | None:
        """Send this process's row.

        Returns:
            Tables [beats, processes, columns]: of the beat before, if nobody has waited for it, and, if we `wait`, of
            this one; None if that is none.
        """
        mine = np.array([row], np.float32)
        if jax.process_count() == 1:
            return mine[None]
        rows = jax.make_array_from_process_local_data(self._rows, mine, (jax.process_count(), len(row)))
        before, now = self._held, in_turn(self._gather(rows))
        self._held = None if wait else now
        ready = [beat for beat in (before, now if wait else None) if beat is not None]
        return np.stack([np.asarray(beat) for beat in ready]) if ready else None
