"""The hub in process 0: it knows which processes have arrived where, which have failed and which are gone.

Each process holds one TCP connection to the hub from before JAX starts until the process ends. The kernel closes the
connection with the process, however that ends, so a loss is known within milliseconds. Messages are JSON, one a line:

    to the hub     {"process": 1, "who": "process 1 (n2)", "name": "start", "value": "", "seconds": 60, "last": false}
                   {"process": 1, "who": "process 1 (n2)", "failure": "process 1 (n2): no space left", "code": 2}
    from the hub   {"hub": "process 0 (n1)"}                                             at once
                   {"name": "start", "values": [["...", [0, 1]], ...], "last": false}    all have arrived: values, whose
                   {"name": "start", "error": "process 2 did not arrive", "last": true}  they have not, in time
                   {"failure": "process 1 (n2): no space left", "code": 2}               to all, its sender included

A process that ends after an answer with "last" is no loss: it has given up or has finished.
"""

from __future__ import annotations

import json
import selectors
import socket
import threading
import time
from collections import defaultdict
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from megajax.config.base import NotReady

HELLO = "start"
"""Name of the gathering at which every process's first message arrives."""
LOST = "ended without a word (killed, out of memory, or its host is gone): the end of its own log may tell"

Message = dict[str, Any]


@dataclass
class Lines:
    """Send and receive JSON lines over a socket."""

    socket: socket.socket
    rest: bytes = b""

    def send(self, message: Message) -> None:
        """Send a message if the other end still listens."""
        with suppress(OSError):  # reading tells that the other end is gone
            self.socket.sendall(json.dumps(message).encode() + b"\n")

    def receive(self) -> list[Message] | None:
        """Return the messages since the last call, waiting for at least a part of one; None if the other end is gone.

        Raises:
            ValueError: a line is not a message.
        """
        try:
            data = self.socket.recv(2**16)
        except OSError:
            data = b""
        if not data:
            return None
        *lines, self.rest = (self.rest + data).split(b"\n")
        return [json.loads(line) for line in lines]


def keep_alive(connection: socket.socket, seconds: int) -> None:
    """Let the kernel find out within `seconds` that the other host is gone."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    third = max(seconds // 3, 1)
    options = {"KEEPIDLE": third, "KEEPINTVL": third, "KEEPCNT": 2, "USER_TIMEOUT": 1000 * seconds}
    for name, value in options.items():
        if hasattr(socket, f"TCP_{name}"):  # as on Linux
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, f"TCP_{name}"), value)


@dataclass
class _Member(Lines):
    process: int = -1
    """Number of the process; None until it has told it."""
    who: str = ""
    excused: bool = False
    """Whether the process has been given its last answer."""


@dataclass
class _Round:
    """The processes that have arrived at a gathering, with their values."""

    seconds: float
    values: dict[int, str] = field(default_factory=dict)
    deadline: float = 0.0

    def __post_init__(self) -> None:
        self.deadline = time.monotonic() + self.seconds


class Hub(threading.Thread):
    """Serve all processes of a run, process 0 too, in a thread of process 0.

    It listens on the coordinator's port until all are there, and then leaves the port to JAX's own service.
    """

    def __init__(self, port: int, processes: int, who: str, start_seconds: int, heartbeat_seconds: int) -> None:
        """Listen on a port for the processes of a run.

        Raises:
            NotReady: the port is taken.
        """
        super().__init__(name="megajax-hub", daemon=True)
        dual = socket.has_dualstack_ipv6()
        family = socket.AF_INET6 if dual else socket.AF_INET
        try:
            self._listener = socket.create_server(
                ("", port), family=family, dualstack_ipv6=dual, backlog=min(processes, 4096) + 16
            )
        except OSError as error:
            raise NotReady(
                f"port {port} of {who} cannot be listened on ({error.strerror}): another run may still be there; "
                "end it, or give this one another coordinator port"
            ) from error
        self._processes, self._who, self._heartbeat = processes, who, heartbeat_seconds
        self._members: dict[int, _Member] = {}
        self._rounds = {HELLO: _Round(start_seconds)}
        self._gone: set[int] = set()
        self._failed = False
        self._refusal: Message = {}
        """Answer to processes that come after the start has failed."""
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self.told = threading.Event()
        """Event after a failure: all processes but process 0 have learnt of it and are gone."""

    def run(self) -> None:
        """Serve until the process ends."""
        while True:
            deadline = min((round_.deadline for round_ in self._rounds.values()), default=float("inf"))
            patience = min(deadline - time.monotonic(), 3600.0)
            for key, _ in self._selector.select(max(patience, 0)):
                if key.fileobj is self._listener:
                    self._accept()
                else:
                    self._read(key.data)
            now = time.monotonic()
            for name in [name for name, round_ in self._rounds.items() if round_.deadline <= now]:
                self._give_up(name)

    def _accept(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except OSError:  # closed meanwhile, or the peer has hung up
            return
        keep_alive(connection, self._heartbeat)
        connection.settimeout(self._heartbeat)
        member = _Member(connection)
        member.send({"hub": self._who})
        self._selector.register(connection, selectors.EVENT_READ, member)

    def _read(self, member: _Member) -> None:
        try:
            messages = member.receive()
            for message in messages or []:
                self._handle(member, message)
        except (ValueError, TypeError, KeyError):
            if member.process >= 0:
                raise
            messages = None  # a stranger, such as a port scanner
        if messages is None:
            self._selector.unregister(member.socket)
            member.socket.close()
            if self._members.get(member.process) is member:
                del self._members[member.process]
                self._gone.add(member.process)
                if not member.excused:
                    self._fail(f"{member.who} {LOST}", 1)
        if self._failed and not self._members.keys() - {0}:
            self.told.set()

    def _handle(self, member: _Member, message: Message) -> None:
        process = message["process"]
        if member.process < 0:
            if self._refusal:
                return member.send(self._refusal)
            member.process, member.who = process, message["who"]
            if process >= self._processes:
                self._refuse(
                    member, f"{member.who} came to a run of {self._processes} processes: tell all the same number"
                )
            elif process in self._members:
                other = self._members[process].who
                self._refuse(member, f"{member.who} came although {other} is there: give every process its own number")
            else:
                self._members[process] = member
        if "failure" in message:
            self._fail(message["failure"], message["code"])
        elif self._members.get(process) is member:
            self._arrive(member, message)

    def _arrive(self, member: _Member, message: Message) -> None:
        name, seconds = message["name"], message["seconds"]
        member.excused = False
        round_ = self._rounds.setdefault(name, _Round(seconds or float("inf")))
        round_.values[message["process"]] = message["value"]
        gone = self._gone - round_.values.keys()
        if gone:
            self._fail(f"process {min(gone)} has ended before '{name}'", 1)
        elif len(round_.values) == self._processes:
            del self._rounds[name]
            if name == HELLO:
                self._stop_listening()
            whose = defaultdict(list)
            for process, value in sorted(round_.values.items()):
                whose[value].append(process)
            self._answer(round_, {"name": name, "values": list(whose.items()), "last": message["last"]})

    def _give_up(self, name: str) -> None:
        round_ = self._rounds[name]
        missing = [process for process in range(self._processes) if process not in round_.values]
        names = [
            self._members[process].who if process in self._members else f"process {process}" for process in missing
        ]
        some = ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")
        self._end(name, f"{some} did not arrive at '{name}' within {round_.seconds} s: look at the log there")

    def _refuse(self, stranger: _Member, error: str) -> None:
        if HELLO in self._rounds:
            self._end(HELLO, error)
        stranger.send({"name": HELLO, "error": error, "last": True})

    def _end(self, name: str, error: str) -> None:
        """End a gathering that cannot be completed."""
        round_, answer = self._rounds.pop(name), {"name": name, "error": error, "last": True}
        if name == HELLO:
            self._stop_listening()
            self._refusal = answer
        self._answer(round_, answer)

    def _fail(self, failure: str, code: int) -> None:
        if not self._failed:  # later failures follow from the first one
            self._failed = True
            self._tell({"failure": failure, "code": code}, self._members)

    def _answer(self, round_: _Round, message: Message) -> None:
        for process in round_.values.keys() & self._members.keys():
            self._members[process].excused = message["last"]
        self._tell(message, round_.values)

    def _tell(self, message: Message, processes: Iterable[int]) -> None:
        for process in sorted(processes, reverse=True):  # process 0 last: once told it may end, with this thread
            if process in self._members:
                self._members[process].send(message)

    def _stop_listening(self) -> None:
        if self._listener.fileno() >= 0:
            self._selector.unregister(self._listener)
            self._listener.close()
