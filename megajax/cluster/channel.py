"""A process's end of its line to the hub: meet the others, tell them of a failure, hear of theirs."""

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
"""Time for a failure to reach everyone, before the process that it started in ends."""
_ECHO_SECONDS = 1
"""Time for another process's failure to be heard of, before a broken collective counts as one's own."""


class Channel:
    """The line of one process. Only `fail`, and a failure elsewhere, end the process."""

    def __init__(self, launch: Launch, config: ClusterConfig) -> None:
        """Connect to process 0, where this starts the hub.

        Raises:
            NotReady: it does not answer within `start_seconds`.
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
        """Wait for every process to arrive at `name`, as long as all live; return what each of them came with.

        Args:
            name: the same everywhere; to be used again once all have left it.
            value: what this process tells the others.
            seconds: after which to give up.
            last: from then on nobody is missed who ends.

        Raises:
            NotReady: naming those that did not arrive in time.
        """
        answers = self._answers[name] = SimpleQueue()
        self._excused = False
        self._send({"name": name, "value": value, "seconds": seconds, "last": last})
        try:
            # The hub keeps the time; a little later it is the hub itself that does not answer.
            answer = answers.get(timeout=seconds and seconds + _SPREAD_SECONDS)
        except Empty:
            answer = {"error": f"{self._first} does not answer at '{name}': look at the log there"}
        if "error" in answer:
            raise NotReady(answer["error"])
        return [
            value for _, value in sorted((process, value) for value, whose in answer["values"] for process in whose)
        ]

    def leave(self) -> None:
        """Wait until all have finished; none is missed from then on."""
        self.gather("end", last=True)

    def fail(self, text: str, code: int) -> NoReturn:
        """End the run: this process with `code`, and all others with it once they have heard why."""
        self._failing.set()
        failure = f"{self.who}: {text}"
        print(f"megajax: {failure}", file=sys.stderr, flush=True)
        self._send({"failure": failure, "code": code})
        self._told.wait(_SPREAD_SECONDS)
        self._leave(code)

    @contextmanager
    def guard(self) -> Iterator[None]:
        """Open a context whose exceptions end the run at once, and whose end all processes reach together.

        It may stand in another one: around what has to fail before the exit of a context in between waits for others.
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
        """Take what comes; a failure elsewhere ends this process, whatever it is busy with."""
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
        """End at once: the exit handlers of JAX would wait for the others."""
        if self._hub is not None:
            self._hub.told.wait(_SPREAD_SECONDS)
        with suppress(OSError, ValueError):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)

    def _send(self, message: Message) -> None:
        self._lines.send({"process": self._process, "who": self.who, **message})


def _connect(host: str, port: int, config: ClusterConfig) -> tuple[Lines, str]:
    """Open a line to the hub, trying again until it is there; return it and what the hub calls itself."""
    deadline = time.monotonic() + config.start_seconds
    why = "nothing listens"
    while (left := deadline - time.monotonic()) > 0:
        try:
            lines = Lines(socket.create_connection((host, port), timeout=min(left, 5.0)))
            greeting = lines.receive()  # a service of another run may still be there, and greets otherwise
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
