"""Processes and devices that differ from the others are found, and devices are put in order."""

from __future__ import annotations

from dataclasses import dataclass

from megajax.cluster.join import devices_by_host, odd_one_out, tensor_warning


@dataclass(frozen=True)
class Device:
    """What the functions look at."""

    process_index: int
    id: int


def test_devices_of_a_host_follow_each_other():
    """The launcher dealt its numbers out cyclically: 0 and 2 are on one host, 1 and 3 on the other."""
    hosts = ("n1", "n2", "n1", "n2")
    devices = [Device(process, 2 * process + local) for process in range(4) for local in range(2)]
    ordered = devices_by_host(devices, hosts)
    assert [device.id for device in ordered] == [0, 1, 4, 5, 2, 3, 6, 7]
    assert [hosts[device.process_index] for device in ordered] == ["n1"] * 4 + ["n2"] * 4


def test_tensor_stays_in_a_host_or_is_told():
    devices = [Device(process, process) for process in range(8)]
    hosts = ["n1"] * 4 + ["n2"] * 4
    assert tensor_warning(4, devices, hosts) is None
    assert "parallel.tensor 8 does not divide the 4 devices of a host" in str(tensor_warning(8, devices, hosts))
    assert "the 2 devices" in str(tensor_warning(4, devices, ["n1"] * 6 + ["n2"] * 2))


def test_the_odd_one_out_is_named():
    facts = [{"JAX": "0.12.0", "config": "a"} for _ in range(8)]
    hosts = [f"host-{process}" for process in range(8)]
    assert odd_one_out(facts, hosts) is None
    facts[3] = {"JAX": "0.10.2", "config": "b"}
    line = "process 3 (host-3) has JAX 0.10.2, the other 7 have 0.12.0: it has to be the same everywhere"
    assert odd_one_out(facts, hosts) == line
    facts[0] = facts[3]
    line = "process 0 (host-0) has JAX 0.10.2, process 3 (host-3) has JAX 0.10.2, the other 6 have 0.12.0: "
    assert str(odd_one_out(facts, hosts)).startswith(line)


def test_of_two_both_are_named():
    line = "process 1 (b) has GPUs 7, process 0 (a) has 8: it has to be the same everywhere"
    assert odd_one_out([{"GPUs": "8"}, {"GPUs": "7"}], ["a", "b"]) == line
