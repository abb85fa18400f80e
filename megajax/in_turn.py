"""Programs with collectives must not overlap on CPU devices: a trap of XLA's CPU backend, and the way round it.

Dispatch is asynchronous, and on CPU devices programs that do not depend on each other run at once. Then gloo pairs up
collectives of different programs, or within a process the devices of one program wait for threads that those of another
hold: all wait for ever (seen with jax 0.10.2: sixty small all-reduces dispatched in a row by four processes hang within
seconds; waiting for each, never). GPUs run programs in the order of their dispatch.
"""

from __future__ import annotations

from typing import TypeVar

import jax

T = TypeVar("T")


def take_turns() -> bool:
    """Whether programs have to be waited for: on several CPU devices."""
    return jax.default_backend() == "cpu" and jax.device_count() > 1


def in_turn(result: T) -> T:
    """Pass on the result of a program that has collectives; where programs take turns, once it is there."""
    if take_turns():
        jax.block_until_ready(result)
    return result
