"""Processes meet at a hub; here they are threads, each with a connection of its own."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest

from megajax.cluster.channel import Channel
from megajax.cluster.detect import Launch
from megajax.cluster.hub import HELLO
from megajax.config import ClusterConfig, InputError

SECONDS = 2


def free_port() -> int:
    with socket.create_server(("localhost", 0)) as server:
        return server.getsockname()[1]


def meet(numbers: list[int], processes: int, visit: Callable[[Channel], object]) -> list[object]:
    """What `visit` returns, or the error it raises, in each of these processes of a run."""
    port = free_port()
    config = ClusterConfig(start_seconds=SECONDS)

    def one(number: int) -> object:
        try:
            channel = Channel(Launch("test", processes, number, f"localhost:{port}"), config)
            channel.gather(HELLO, seconds=SECONDS)
            found = visit(channel)
            channel.leave()
            return found
        except InputError as error:
            return str(error)

    with ThreadPoolExecutor(len(numbers)) as pool:
        return list(pool.map(one, numbers))


def test_everyone_learns_what_everyone_brought():
    def visit(channel: Channel) -> list[str]:
        return channel.gather("twice", channel.who[:9]) + channel.gather("twice", "same")

    told = ["process 0", "process 1", "process 2", "same", "same", "same"]
    assert meet([0, 1, 2], 3, visit) == [told] * 3


def test_a_missing_process_is_named():
    errors = meet([0, 2], 4, lambda channel: None)
    assert errors == [f"process 1, process 3 did not arrive at 'start' within {SECONDS} s: look at the log there"] * 2


def test_without_process_0():
    (error,) = meet([1], 2, lambda channel: None)
    assert "process 0 was not found at localhost:" in str(error)
    assert f"within {SECONDS} s" in str(error)


def test_a_number_given_twice():
    errors = meet([0, 1, 1], 3, lambda channel: None)
    host = socket.gethostname()
    line = f"process 1 ({host}) came although process 1 ({host}) is there: give every process its own number"
    assert errors == [line] * 3


def test_a_port_that_is_taken():
    with socket.create_server(("", free_port())) as other:
        port = other.getsockname()[1]
        with pytest.raises(InputError, match=f"port {port} of process 0 .* another run may still be there"):
            Channel(Launch("test", 2, 0, f"localhost:{port}"), ClusterConfig())


def test_late_at_a_barrier():
    given_up = threading.Barrier(3)

    def visit(channel: Channel) -> None:
        try:
            if not channel.who.startswith("process 1"):
                channel.gather("save", seconds=1)
        finally:
            given_up.wait()
        raise InputError("late")

    line = f"process 1 ({socket.gethostname()}) did not arrive at 'save' within 1 s: look at the log there"
    assert meet([0, 1, 2], 3, visit) == [line, "late", line]
