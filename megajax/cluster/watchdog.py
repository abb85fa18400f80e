"""A watchdog thread that ends a process without progress, after printing what it was doing."""

from __future__ import annotations

import faulthandler
import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Self

from megajax.cluster.channel import HUNG
from megajax.cluster.join import Cluster

PATIENCE = 10


class Watchdog:
    """End the process if `beat` is not called often enough while this context is open.

        with Watchdog(600, "runs/gpt", cluster) as dog:
            for step in ...:
                dog.beat(f"step {step}")

    Before the end it prints one line with the last beat, and every thread's stack here and in the other processes. The
    exit code is 4. The context may be entered again.
    """

    def __init__(self, seconds: float | None, where: str, cluster: Cluster | None = None) -> None:
        """Allow `seconds` of silence (None = any) in a run called `where`, which has other processes in `cluster`."""
        self._seconds, self._where = seconds, where
        self._channel = None if cluster is None else cluster.channel
        self._patient = 0
        self._over = threading.Event()
        self.beat("the start")

    def beat(self, what: str) -> None:
        """Note progress: `what` has been done."""
        self._what, self._time = what, time.monotonic()

    @contextmanager
    def patient(self) -> Iterator[None]:
        """Allow the block `PATIENCE` times as long: a compilation, an evaluation, a save, a restore."""
        self._patient += 1
        try:
            yield
        finally:
            self.beat(self._what)
            self._patient -= 1

    def __enter__(self) -> Self:
        if self._seconds is not None:
            self.beat(self._what)
            self._over.clear()
            self._thread = threading.Thread(
                target=self._watch, args=(self._seconds,), name="megajax-watchdog", daemon=True
            )
            self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._over.set()
        if self._seconds is not None:
            self._thread.join()

    def _watch(self, seconds: float) -> None:
        while not self._over.wait(seconds / 8):
            limit = seconds * (PATIENCE if self._patient else 1)
            # If native code holds Python's lock, this thread stands still too; then the timer in C expires, with exit
            # code 1.
            faulthandler.dump_traceback_later(2 * limit, exit=True, file=2)
            if time.monotonic() - self._time > limit:
                self._bark(limit)
        faulthandler.cancel_dump_traceback_later()

    def _bark(self, seconds: float) -> None:
        text = f"{self._where}: no progress for {seconds:g} s after {self._what}"
        print(f"megajax: {text}; the stacks of all threads:", file=sys.stderr, flush=True)
        faulthandler.dump_traceback(2)
        if self._channel is not None:
            self._channel.fail(text, HUNG)
        sys.stdout.flush()
        os._exit(HUNG)
