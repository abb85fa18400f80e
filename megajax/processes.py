"""Tools for several processes: programs that take turns on CPU devices, and texts that every process is told.

Programs with collectives must not overlap on CPU devices, because of a trap in XLA's CPU backend. Dispatch is
asynchronous, and on CPU devices programs that do not depend on each other run at once. Then gloo pairs up collectives
of different programs, or within a process the devices of one program wait for threads that those of another hold, and
all wait for ever (seen with jax 0.10.2: sixty small all-reduces that four processes dispatch in a row hang within
seconds; if each is waited for, they never do). GPUs run programs in the order of their dispatch.
"""

from __future__ import annotations

from typing import TypeVar

import jax
import numpy as np
from jax.experimental import multihost_utils

T = TypeVar("T")
UNIT = 1024
"""Unit in bytes of the size of messages, which is rounded up; few sizes are sent, as JAX compiles a program for
each."""


def take_turns() -> bool:
    """Tell whether each program with collectives has to be waited for, which is so on several CPU devices."""
    return jax.default_backend() == "cpu" and jax.device_count() > 1


def in_turn(result: T) -> T:
    """Pass on the result of a program with collectives, and wait for it where programs take turns."""
    if take_turns():
        jax.block_until_ready(result)
    return result


def gather(text: str) -> list[str]:
    """Return the text of every process, in the order of processes; all have to call it."""
    if jax.process_count() == 1:
        return [text]
    said = np.frombuffer(text.encode(), np.uint8)
    units = multihost_utils.process_allgather(np.int32(said.size // UNIT + 1)).max()
    own = np.zeros(units * UNIT, np.uint8)
    own[: said.size] = said
    return [bytes(row).rstrip(b"\0").decode() for row in multihost_utils.process_allgather(own)]


def first(text: str) -> str:
    """Return the first text of a process that is not empty, with the number of the process where there are several."""
    said = gather(text)
    where = (f" (process {index})" if len(said) > 1 else "" for index in range(len(said)))
    return next((text + place for text, place in zip(said, where, strict=True) if text), "")
