"""Code that the chaos test adds to every process of a job: marks on stdout that tell what it is doing, and a fault."""

from __future__ import annotations

import faulthandler
import os
import signal
from dataclasses import dataclass
from typing import Any

ERROR = "chaos: raised on purpose"
PLACES = {"start-up": "__init__", "step": "take_step", "save": "save", "evaluation": "evaluate"}
"""Methods of the trainer that are marked, and may raise, by what the chaos test calls them."""


@dataclass(frozen=True)
class Fault:
    """Where an exception is raised: in one process, once it has taken so many steps since this start."""

    rank: int
    place: str
    after: int


def install(rank: int, fault: Fault | None, cache: str) -> None:
    """Have this process talk, raise, and compile nothing that is in `cache`. Call before training."""
    faulthandler.register(signal.SIGUSR2)  # by which a process that hangs is asked where
    print(f"chaos: process {rank} is {os.getpid()}", flush=True)
    import jax

    from megajax.train import Trainer

    jax.config.update("jax_compilation_cache_dir", cache)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)

    taken = 0

    def wrap(place: str, method: str) -> None:
        original = getattr(Trainer, method)

        def call(self: Trainer, *arguments: Any, **options: Any) -> Any:
            nonlocal taken
            if rank == 0 and place != "start-up":
                print(f"chaos: {place} {self.step}", flush=True)
            if fault and (fault.rank, fault.place) == (rank, place) and taken >= fault.after:
                print("chaos: raising", flush=True)
                raise RuntimeError(ERROR)
            taken += place == "step"
            return original(self, *arguments, **options)

        setattr(Trainer, method, call)

    for place, method in PLACES.items():
        wrap(place, method)
