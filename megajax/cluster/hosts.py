"""Which devices share a host."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import jax

from megajax.cluster.join import Cluster, agree


def devices_by_host(devices: Sequence[jax.Device], hosts: Sequence[str]) -> list[jax.Device]:
    """The devices in an order in which those of a host follow each other, however the launcher dealt out the numbers.

    Args:
        devices: all devices.
        hosts: host name of every process.
    """
    return sorted(
        devices, key=lambda device: (hosts.index(hosts[device.process_index]), device.process_index, device.id)
    )


def tensor_warning(tensor: int, devices: Sequence[jax.Device], hosts: Sequence[str]) -> str | None:
    """What to say where the mesh axis `tensor` does not fit into a host; None if it does."""
    smallest = min(Counter(hosts[device.process_index] for device in devices).values())
    if smallest % tensor == 0:
        return None
    return (
        f"parallel.tensor {tensor} does not divide the {smallest} devices of a host: every layer's collectives cross "
        "the network between hosts; let pipe, data or fsdp do that"
    )


def check_devices(cluster: Cluster, seconds: int) -> None:
    """Make sure that every process has as many devices as the others, of the same kind. Starts JAX's backend.

    Raises:
        InputError: naming the odd one out, in every process.
    """
    kinds = Counter(device.device_kind for device in jax.local_devices())
    agree(cluster, {"devices": " + ".join(f"{count} x {kind}" for kind, count in kinds.items())}, seconds)
