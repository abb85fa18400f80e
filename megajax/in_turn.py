"""Programs of several processes on CPU devices must not overlap: a trap of XLA's CPU backend, and the way round it.

Dispatch is asynchronous, and on CPU devices programs that do not depend on each other run at once. Gloo then pairs up
collectives of different programs, and all processes wait for ever (seen with jax 0.10.2: sixty small all-reduces
dispatched in a row by four processes hang within seconds; waiting for each, never). GPUs run programs in the order of
their dispatch.
"""

from __future__ import annotations

from typing import TypeVar

import jax

T = TypeVar("T")


def in_turn(result: T) -> T:
    """Pass on the result of a program that has collectives; on CPU devices of several processes, once it is there."""
    if jax.process_count() > 1 and jax.default_backend() == "cpu":
        jax.block_until_ready(result)
    return result
