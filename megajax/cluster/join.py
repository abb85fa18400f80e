"""Join: bring the processes of a run together, and make sure that program and configuration are the same in all.

Their devices are compared as well, and ordered so that the devices of a host follow each other.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import socket
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path

import jax

from megajax.cluster.channel import Channel
from megajax.cluster.detect import Launch
from megajax.cluster.hub import HELLO
from megajax.config.base import InputError
from megajax.config.cli import describe_failure
from megajax.config.config import ClusterConfig

_CLOCK_SECONDS = 30
_joined: tuple[Launch, Channel] | None = None


@dataclass(frozen=True)
class Cluster:
    """The processes of a run, as seen by one of them."""

    launch: Launch
    hosts: tuple[str, ...]
    """Host name of every process."""
    channel: Channel | None = field(default=None, repr=False, compare=False)
    """Connection to the other processes; None if there are none."""

    @property
    def processes(self) -> int:
        """Return the number of processes."""
        return self.launch.processes

    @property
    def process(self) -> int:
        """Return the number of this process."""
        return self.launch.process

    @property
    def first(self) -> bool:
        """Tell whether this is process 0, which speaks for all."""
        return self.process == 0

    def gather(self, name: str, value: str = "", seconds: int | None = None) -> list[str]:
        """Wait until every process is at `name`, and return the values that they brought.

        Raises:
            InputError: processes did not arrive within `seconds` (None = as long as all live); the message names them.
        """
        return [value] if self.channel is None else self.channel.gather(name, value, seconds)

    def barrier(self, name: str, seconds: int | None = None) -> None:
        """Wait until every process is at `name` (see `gather`)."""
        self.gather(name, "", seconds)

    @contextmanager
    def first_alone(self, name: str) -> Iterator[None]:
        """Let process 0 pass the block before the others enter it, so that they find what it has made."""
        if not self.first:
            self.barrier(name)
        yield
        if self.first:
            self.barrier(name)

    def guard(self) -> AbstractContextManager[None]:
        """Open a context whose exceptions end all processes at once (see `Channel.guard`); alone, it does nothing."""
        return nullcontext() if self.channel is None else self.channel.guard()


def join(launch: Launch, config: ClusterConfig, identity: Mapping[str, str]) -> Cluster:
    """Meet the other processes and start JAX in all of them.

    This has to be called before anything asks JAX for a device.

    Args:
        launch: place of this process.
        config: times to wait.
        identity: text that has to be the same everywhere besides the versions, such as a digest of the configuration.

    Raises:
        InputError: a process is missing or differs from the others; every process raises the same error.
    """
    global _joined  # noqa: PLW0603 - JAX's runtime is one for the process, too
    if launch.processes == 1:
        return Cluster(launch, (socket.gethostname(),))
    channel = Channel(launch, config) if _joined is None else _joined[1]
    if _joined is not None:
        if _joined[0] != launch:
            raise InputError(f"this process has joined others as {_joined[0].describe()}: restart it to change that")
        print("megajax: this process has joined the others before: going on with them")
    cluster = Cluster(launch, tuple(channel.gather(HELLO, socket.gethostname(), config.start_seconds)), channel)
    agree(cluster, _facts(launch) | dict(identity), config.start_seconds)
    _compare_clocks(cluster, config)
    if _joined is None:
        try:
            _start_runtime(launch, config)
        except Exception as error:  # the others are about to wait for this process
            code, text = describe_failure(error)
            channel.fail(text, code)
        _joined = launch, channel
    return cluster


def agree(cluster: Cluster, facts: Mapping[str, str], seconds: int) -> None:
    """Make sure that the facts about this process are those about every other.

    Raises:
        InputError: a process differs; the message, the same in every process, names it.
    """
    told = [json.loads(each) for each in cluster.gather("comparison", json.dumps(facts), seconds)]
    if wrong := odd_one_out(told, cluster.hosts):
        if cluster.channel is not None:
            cluster.channel.leave()  # all processes know, and end with the same error
        raise InputError(wrong)


def odd_one_out(facts: Sequence[Mapping[str, str]], hosts: Sequence[str]) -> str | None:
    """Return a line that names the process that differs from the others, and in what, or None if none does."""
    for fact in facts[0]:
        values = [each.get(fact, "none") for each in facts]
        (usual, count), *_ = Counter(values).most_common()
        odd = [process for process, value in enumerate(values) if value != usual]
        if odd:
            named = [f"process {process} ({hosts[process]}) has {fact} {values[process]}" for process in odd[:4]]
            more = f" and {len(odd) - 4} more differ" if len(odd) > 4 else ""
            like = values.index(usual)
            rest = f"the other {count} have" if count > 1 else f"process {like} ({hosts[like]}) has"
            return f"{', '.join(named)}{more}, {rest} {usual}: it has to be the same everywhere"
    return None


def _facts(launch: Launch) -> dict[str, str]:
    """Return the facts that have to be the same in every process."""
    code = hashlib.sha256()
    for file in sorted(Path(__file__).parents[1].rglob("*.py")):
        code.update(file.read_bytes())
    return {
        "processes": str(launch.processes),
        "JAX": jax.__version__,
        "jaxlib": version("jaxlib"),
        "Python": ".".join(platform.python_version_tuple()[:2]),
        "MegaJAX's code": code.hexdigest()[:8],
    }


def _compare_clocks(cluster: Cluster, config: ClusterConfig) -> None:
    clocks = [float(clock) for clock in cluster.gather("clocks", str(time.time()), config.start_seconds)]
    for process, clock in enumerate(clocks):
        if abs(clock - clocks[0]) > _CLOCK_SECONDS and cluster.first:
            off = f"process {process} ({cluster.hosts[process]}) is {clock - clocks[0]:+.0f} s off process 0's"
            print(f"megajax: warning: the clock of {off}: logs and file times will mislead", file=sys.stderr)


def _start_runtime(launch: Launch, config: ClusterConfig) -> None:
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    # JAX would catch SIGTERM, but the run needs it: it then saves a checkpoint.
    jax.config.update("jax_enable_preemption_service", False)
    jax.distributed.initialize(
        launch.coordinator,
        launch.processes,
        launch.process,
        local_device_ids=_own_gpus(launch),
        cluster_detection_method="deactivate",
        initialization_timeout=config.start_seconds,
        heartbeat_timeout_seconds=config.heartbeat_seconds,
        shutdown_timeout_seconds=config.start_seconds,
    )


def _own_gpus(launch: Launch) -> list[int] | None:
    """Return this process's share of the visible GPUs where several processes share a host; None = all of them."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if (jax.config.jax_platforms or "").startswith("cpu"):  # type: ignore[attr-defined]
        return None
    gpus = _gpus_of_host() if visible is None else len([name for name in visible.split(",") if name])
    among = launch.local_processes or 1
    if among == 1 or gpus <= 1:  # the launcher has assigned them
        return None
    if gpus % among:
        raise InputError(
            f"{gpus} GPUs cannot be dealt out to {among} processes: start as many as divide them, or set "
            "CUDA_VISIBLE_DEVICES for each"
        )
    share = gpus // among
    return list(range(launch.local_process * share, (launch.local_process + 1) * share))


def _gpus_of_host() -> int:
    return len(list(Path("/dev").glob("nvidia[0-9]*")))


def devices_by_host(devices: Sequence[jax.Device], hosts: Sequence[str]) -> list[jax.Device]:
    """Order devices so that those of a host follow each other, in whatever order the launcher has numbered processes.

    Args:
        devices: all devices.
        hosts: host name of every process.
    """
    return sorted(
        devices, key=lambda device: (hosts.index(hosts[device.process_index]), device.process_index, device.id)
    )


def tensor_warning(tensor: int, devices: Sequence[jax.Device], hosts: Sequence[str]) -> str | None:
    """Return a warning if the mesh axis `tensor` does not fit into a host, else None."""
    smallest = min(Counter(hosts[device.process_index] for device in devices).values())
    if smallest % tensor == 0:
        return None
    return (
        f"parallel.tensor {tensor} does not divide the {smallest} devices of a host: every layer's collectives cross "
        "the network between hosts; let pipe, data or fsdp do that"
    )


def check_devices(cluster: Cluster, seconds: int) -> None:
    """Make sure that every process has as many devices as the others, of the same kind; this starts JAX's backend.

    Raises:
        InputError: a process differs; the message, the same in every process, names it.
    """
    kinds = Counter(device.device_kind for device in jax.local_devices())
    agree(cluster, {"devices": " + ".join(f"{count} x {kind}" for kind, count in kinds.items())}, seconds)
