"""Device memory: the bytes in use compared with the plan, and advice when memory runs out."""

from __future__ import annotations

import logging
import os
import re
import resource
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import jax
from jax.errors import JaxRuntimeError

from megajax.config.base import InputError

GIB = 2**30
TOLERANCE = 1.1
"""Factor of the plan above which a peak is worth a warning."""
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class DeviceMemory:
    """The memory counts of one device, in bytes."""

    in_use: int
    peak: int
    limit: int
    """Bytes that the allocator may use."""


def device_memory() -> DeviceMemory | None:
    """Return the memory of this process's fullest device, or None if the backend keeps no count (CPU)."""
    counts = [stats for device in jax.local_devices() if (stats := device.memory_stats())]
    every = [
        DeviceMemory(count["bytes_in_use"], count.get("peak_bytes_in_use", 0), count.get("bytes_limit", 0))
        for count in counts
    ]
    return max(every, key=lambda memory: memory.peak, default=None)


def planned_bytes(compiled: Any) -> int:
    """Return the bytes that XLA has planned for a step on one device: arguments, temporaries, and results in memory of
    their own.

    Args:
        compiled: compiled step, a `jax.stages.Compiled`.
    """
    plan = compiled.memory_analysis()
    return plan.argument_size_in_bytes + plan.output_size_in_bytes - plan.alias_size_in_bytes + plan.temp_size_in_bytes


class MemoryWatch:
    """Compare the memory in use with the plan."""

    def __init__(self) -> None:
        self.planned: int | None = None
        """Bytes planned for a device (see `planned_bytes`)."""
        self._told = False

    def look(self) -> dict[str, float]:
        """Return scalars for the metrics files; the first time, log a line, and a warning if the plan was exceeded."""
        memory = device_memory()
        if not self._told:
            self._told = True
            print(describe_memory(memory, self.planned), flush=True)
            if memory and self.planned and memory.peak > TOLERANCE * self.planned:
                above = 100 * (memory.peak / self.planned - 1)
                log.warning("device memory is %.0f %% above the plan: something else than the step holds it", above)
        return {"memory-peak-gib": memory.peak / GIB} if memory else {}


def describe_memory(memory: DeviceMemory | None, planned: int | None) -> str:
    """Return one line with use, peak and plan in GiB; without counts of the device, with the process's own memory."""
    plan = f"; the step is planned to take {planned / GIB:.3f} GiB" if planned is not None else ""
    if memory is None:
        return f"memory: n/a on this device (this process at most {resident_peak() / GIB:.3f} GiB){plan}"
    used = f"{memory.in_use / GIB:.3f} GiB in use, {memory.peak / GIB:.3f} GiB at most"
    return f"memory: {used} of {memory.limit / GIB:.3f} GiB a device{plan}"


def resident_peak() -> int:
    """Return the largest host memory, in bytes, that this process has held."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else 1024 * peak


@contextmanager
def explained_out_of_memory() -> Iterator[None]:
    """Turn XLA's "out of memory" error, from compiling or running, into one line.

    Raises:
        InputError: memory ran out; the message tells needed and available bytes and advises.
    """
    try:
        yield
    except JaxRuntimeError as error:
        line = explain_out_of_memory(str(error), device_memory())
        if line is None:
            raise
        raise InputError(line) from error


def explain_out_of_memory(message: str, memory: DeviceMemory | None) -> str | None:
    """Return one line that explains XLA's message and names its device, or None if memory is not the matter."""
    if "RESOURCE_EXHAUSTED" not in message and "OUT_OF_MEMORY" not in message:
        return None
    needed = requested_bytes(message)
    need = f"needs {needed:,} bytes ({needed / GIB:.2f} GiB) more" if needed is not None else "needs more"
    if memory is not None:
        free = memory.limit - memory.in_use
        available = f"{free:,} bytes ({free / GIB:.2f} GiB) of {memory.limit / GIB:.2f} GiB are available"
    elif "SC_AVPHYS_PAGES" in os.sysconf_names:
        free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        available = f"{free:,} bytes ({free / GIB:.2f} GiB) of this host are available"
    else:
        available = "how much is available is unknown"
    return (
        f"out of memory: a device {need}, {available}: lower train.micro_batch_size, raise parallel.fsdp, "
        "parallel.tensor or parallel.pipe, or set train.remat=full"
    )


def requested_bytes(message: str) -> int | None:
    """Return the size in bytes of the failed allocation, which XLA's message gives exactly or rounded ("18.09GiB")."""
    text = re.search(r"alloc\w+ .*", message)
    if text is None:
        return None
    sizes = re.findall(r"(\d+(?:\.\d+)?) ?(bytes|B|KiB|MiB|GiB|TiB)\b", text[0])
    exact = [number for number, unit in sizes if unit in ("bytes", "B")]
    if exact:
        return int(exact[0])
    powers = {"KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}
    return next((round(float(number) * powers[unit]) for number, unit in sizes), None)
