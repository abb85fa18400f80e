"""A save that fails is reported once: `Checkpoints` raises it, and Orbax's threads print no tracebacks of their own."""

from __future__ import annotations

import logging
import sys
from functools import cache


@cache
def quiet_orbax() -> None:
    """Silence what Orbax and TensorStore print about errors that they also raise; once per process."""
    for name in ("absl", "asyncio"):
        logging.getLogger(name).setLevel(logging.CRITICAL)
    others = sys.unraisablehook

    def hook(problem: sys.UnraisableHookArgs) -> None:
        # TensorStore answers writes that were in flight after Orbax has closed the event loop they belonged to.
        if str(problem.exc_value) != "Event loop is closed":
            others(problem)

    sys.unraisablehook = hook
