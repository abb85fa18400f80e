"""A process's connection to the hub, by which processes meet and learn of each other's failures."""

from __future__ import annotations

import faulthandler
import os
import socket
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from queue import Empty, SimpleQueue
from typing import NoReturn

from megajax.cluster.detect import Launch
from megajax.cluster.hub import LOST, Hub, Lines, Message, keep_alive
from megajax.config.base import NotReady
from megajax.config.cli import describe_failure
from megajax.config.config import ClusterConfig

HUNG = 4
"""Exit code of a run in which a process hung."""
_SPREAD_SECONDS = 3
"""Seconds that a failure has to reach all processes before the process in which it began ends."""
_ECHO_SECONDS = 1
"""Seconds to wait for news of another process's failure before a broken collective counts as one's own."""


class Channel:
    """Connection of one process to the hub; only `fail`, and a failure elsewhere, end the process."""

    def __init__(self, launch: Launch, config: ClusterConfig) -> None:
        """Connect to the hub, which process 0 starts here.

        Raises:
            NotReady: process 0 does not answer within `start_seconds`.
        """
        self.who = f"process {launch.process} ({socket.gethostname()})"
        self._process, self._config = launch.process, config
        host, _, port = str(launch.coordinator).rpartition(":")
        self._hub = None
        if launch.process == 0:
            self._hub = Hub(int(port), launch.processes, self.who, config.start_seconds, config.heartbeat_seconds)
            self._hub.start()
            host = "localhost"
        self._lines, self._first = _connect(host.strip("[]"), int(port), config)
        self._excused, self._guards = False, 0
        self._failing = threading.Event()
        self._told = threading.Event()
        self._answers: dict[str, SimpleQueue[Message]] = {}
        threading.Thread(target=self._listen, name="megajax-channel", daemon=True).start()

    def gather(self, name: str, value: str = "", seconds: int | None = None, *, last: bool = False) -> list[str]:
        """Wait for every process to arrive at `name`, as long as all live, and return the values that they brought.

        Args:
            name: name of the gathering, the same everywhere; it can be used again once all have left.
            value: value that this process tells the others.
            seconds: time after which to give up; None = never.
            last: whether processes may end from then on without being missed.

        Raises:
            NotReady: processes did not arrive in time; the message names them.
        """
        answers = self._answers[name] = SimpleQueue()
        self._excused = False
        self._send({"name": name, "value": value, "seconds": seconds, "last": last})
        try:
            # The hub keeps the time; if nothing has come a little later, the hub itself does not answer.
            answer = answers.get(timeout=seconds and seconds + _SPREAD_SECONDS)
        except Empty:
            answer = {"error": f"{self._first} does not answer at '{name}': look at the log there"}
        if "error" in answer:
            raise NotReady(answer["error"])
        return [
            value for _, value in sorted((process, value) for value, whose in answer["values"] for process in whose)
        ]

    def leave(self) -> None:
        """Wait until all processes have finished; they may end from then on without being missed."""
        self.gather("end", last=True)

    def fail(self, text: str, code: int) -> NoReturn:
        """End the run: this process with `code`, and all others with it once they have learnt why."""
        self._failing.set()
        failure = f"{self.who}: {text}"
        print(f"megajax: {failure}", file=sys.stderr, flush=True)
        self._send({"failure": failure, "code": code})
        self._told.wait(_SPREAD_SECONDS)
        self._leave(code)

    @contextmanager
    def guard(self) -> Iterator[None]:
        """Open a context whose exceptions end the run at once, and whose end all processes reach together.

        Guards may be nested: the inner one ends the run before a context between them waits for others at its exit.
        """
        self._guards += 1
        try:
            yield
        except (Exception, KeyboardInterrupt) as error:
            code, text = describe_failure(error)
            if code == 1:
                time.sleep(_ECHO_SECONDS)
                traceback.print_exception(error)
            self.fail(text, code)
        self._guards -= 1
        if not self._guards:
            self.leave()

    def _listen(self) -> None:
        """Receive messages; a failure elsewhere ends this process, whatever it is doing."""
        while True:
            messages = self._lines.receive()
            for message in messages or []:
                if "failure" not in message:
                    self._excused = message["last"]
                    self._answers[message["name"]].put(message)
                elif self._failing.is_set():
                    self._told.set()
                else:
                    self._heard(message["failure"], message["code"])
            if messages is None:
                self._told.set()
                if not self._excused and not self._failing.is_set():
                    self._heard(f"{self._first} {LOST}", 1)
                return

    def _heard(self, failure: str, code: int) -> None:
        print(f"megajax: {failure}", file=sys.stderr, flush=True)
        if code == HUNG:
            faulthandler.dump_traceback(2)
        self._leave(code)

    def _leave(self, code: int) -> NoReturn:
        """End the process at once, because the exit handlers of JAX would wait for the others."""
        if self._hub is not None:
            self._hub.told.wait(_SPREAD_SECONDS)
        with suppress(OSError, ValueError):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)

    def _send(self, message: Message) -> None:
        self._lines.send({"process": self._process, "who": self.who, **message})


def _connect(host: str, port: int, config: ClusterConfig) -> tuple[Lines, str]:
    """Open a connection to the hub, trying until it is there; return it and the hub's name for itself."""
    deadline = time.monotonic() + config.start_seconds
    why = "nothing listens"
    while (left := deadline - time.monotonic()) > 0:
        try:
            lines = Lines(socket.create_connection((host, port), timeout=min(left, 5.0)))
            greeting = lines.receive()  # another run's service may still listen there; it greets differently
            if greeting and "hub" in greeting[0]:
                lines.socket.settimeout(None)
                keep_alive(lines.socket, config.heartbeat_seconds)
                return lines, str(greeting[0]["hub"])
            lines.socket.close()
            why = "what listens there is no MegaJAX"
        except (OSError, ValueError, TypeError, KeyError) as error:
            why = getattr(error, "strerror", None) or "what listens there is no MegaJAX"
        time.sleep(min(0.2, max(left, 0)))
    raise NotReady(
        f"process 0 was not found at {host}:{port} within {config.start_seconds} s ({why}): start it there, "
        "open the port, or correct the coordinator's address"
    )
