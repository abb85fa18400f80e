"""Worker processes that make shards; each reads and writes files itself and exchanges only names and counts."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Sequence
from contextlib import suppress
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import cast

from megajax.config.base import InputError
from megajax.corpus.shards import Job, Shard, ShardWriter, Step


def make_shards(job: Job, shards: Sequence[Shard], workers: int, step: Step) -> None:
    """Make shards on `workers` processes, or in this one.

    Raises:
        InputError: the input cannot be used, or a process was killed.
        OSError: a shard cannot be written.
    """
    if workers == 1 or len(shards) <= 1:
        write = ShardWriter(job)
        for shard in shards:
            write(shard, step)
        return
    todo = iter(shards)
    processes: dict[Connection, BaseProcess] = {}
    try:
        for _ in range(min(workers, len(shards))):
            connection, process = _start(job)
            processes[connection] = process
            _send(connection, process, next(todo))
        while processes:
            for ready in wait(list(processes)):
                connection = cast(Connection, ready)
                message = _receive(connection, processes[connection])
                if message is not None:
                    step(*message)
                    continue
                following = next(todo, None)
                _send(connection, processes[connection], following)
                if following is None:
                    processes.pop(connection).join()
    finally:
        for process in processes.values():
            process.terminate()
            process.join()


def _start(job: Job) -> tuple[Connection, BaseProcess]:
    spawn = multiprocessing.get_context("spawn")
    ours, theirs = spawn.Pipe()
    process = spawn.Process(target=_work, args=(theirs, job), daemon=True)
    process.start()
    theirs.close()  # then the pipe breaks when the process ends
    return ours, process


def _receive(connection: Connection, process: BaseProcess) -> tuple[int, int] | None:
    """Return the next progress of a worker, or None when its shard is finished."""
    try:
        message = connection.recv()
    except (EOFError, ConnectionError):
        raise _ended_early(process) from None
    if isinstance(message, Exception):
        raise message
    return message


def _send(connection: Connection, process: BaseProcess, shard: Shard | None) -> None:
    """Send a worker its next shard, or the word that there are no more."""
    try:
        connection.send(shard)
    except ConnectionError:
        raise _ended_early(process) from None


def _ended_early(process: BaseProcess) -> InputError:
    process.join()
    code = process.exitcode or 0
    how = f"killed by {signal.Signals(-code).name}, for want of memory?" if code < 0 else f"exit code {code}"
    return InputError(f"a worker process ended early ({how}); run again, with fewer workers if need be")


def _work(connection: Connection, job: Job) -> None:
    """Make the shards that arrive through the pipe, until there are no more or the other end is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent receives it too, and ends its workers
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # processes, not threads
    with suppress(EOFError, ConnectionError):  # the other end is gone
        try:
            write = ShardWriter(job)
            while shard := connection.recv():
                write(shard, lambda read, documents: connection.send((read, documents)))
                connection.send(None)
        except (InputError, OSError) as error:
            connection.send(error)
