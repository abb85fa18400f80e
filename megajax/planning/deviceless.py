"""GPUs to compile for on a machine that has none.

    JAX_PLATFORMS=cpu python ...

    mesh = build_mesh(sizes, gpu_topology("H100", 3072))
    compiled = step.lower(abstract_state, abstract_batch).compile()
    compiled.memory_analysis(), collectives(compiled, mesh)

The compiler is that of JAX's CUDA plugin, told what the GPU looks like; neither GPU nor driver is needed, and nothing
can run. The plugin complains on stderr that it found no driver (`cuInit`): harmless. Without a device nothing is
autotuned, so the memory analysis lacks the scratch of tuned kernels; as always, it also lacks the buffers of NCCL
(1-2 GiB), the CUDA context (0.5-0.9 GiB) and fragmentation.
"""

from __future__ import annotations

from importlib.util import find_spec

import jax
from jax.experimental import topologies

from megajax.config.base import InputError
from megajax.costs.hardware import GPUS, Gpu

XLA_FRACTION = 0.8
"""Share of a GPU's memory that XLA plans with, where no client tells it what its allocator has (on a GPU, JAX does)."""
TARGETS = {gpu.name: gpu for gpu in GPUS if gpu.chip}
"""GPUs that XLA can be told about."""


def has_compiler() -> bool:
    """Whether JAX's CUDA plugin, which compiles for GPUs, is installed."""
    return any(find_spec(f"jax_cuda{version}_plugin") for version in (12, 13))


def gpu_topology(name: str, devices: int, gpus_per_host: int = 8) -> list[jax.Device]:
    """Devices to build a mesh of and compile for, one host after the other.

    Where there is no GPU, `JAX_PLATFORMS=cpu` must be set before JAX looks for devices.

    Args:
        name: key of TARGETS.
        devices: how many; a whole number of hosts, or part of one.
        gpus_per_host: GPUs that share a host.

    Raises:
        InputError: unknown GPU, hosts that are not full, or no CUDA plugin.
    """
    if name not in TARGETS:
        raise InputError(f"no compile target {name!r}: choose one of {', '.join(TARGETS)}")
    per_host = min(devices, gpus_per_host)
    if per_host < 1 or devices % per_host:
        raise InputError(f"{devices} GPUs do not fill hosts of {gpus_per_host}: choose a multiple, or part of one host")
    shape = f"1x{devices // per_host}x{per_host}"
    try:
        topology = topologies.get_topology_desc(platform="cuda", target_config=_proto(TARGETS[name]), topology=shape)
    except NotImplementedError as error:
        raise InputError(
            "compiling for a GPU that is not there needs JAX's CUDA plugin (pip install 'megajax[cuda13]') and "
            "JAX_PLATFORMS=cpu, set before JAX looks for devices"
        ) from error
    return list(topology.devices)


def _proto(gpu: Gpu) -> str:
    """XLA's `stream_executor.GpuTargetConfigProto` as text; what the table of GPUs lacks is the same on all of them.

    Its memory is such that XLA plans with what the launcher gives JAX: told less, it repeats collectives to save some.
    """
    chip = gpu.chip
    assert chip is not None
    return f"""
        platform_name: "CUDA"
        dnn_version_info {{ major: 9 minor: 10 }}
        device_description_str: "{chip.device_kind}"
        gpu_device_info {{
            cuda_compute_capability {{ major: {gpu.capability} }}
            core_count: {gpu.multiprocessors}
            fpus_per_core: {chip.lanes}
            clock_rate_ghz: {chip.clock_ghz}
            memory_bandwidth: {int(gpu.memory_bandwidth)}
            device_memory_size: {int(gpu.array_bytes / XLA_FRACTION)}
            l2_cache_size: {chip.l2_cache}
            shared_memory_per_core: {chip.shared_memory}
            shared_memory_per_block_optin: {chip.shared_memory - 1024}
            shared_memory_per_block: 49152
            registers_per_core_limit: 65536
            registers_per_block_limit: 65536
            threads_per_block_limit: 1024
            threads_per_core_limit: 2048
            threads_per_warp: 32
            block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
            thread_dim_limit_x: 1024 thread_dim_limit_y: 1024 thread_dim_limit_z: 64
            device_address_bits: 64
        }}
    """
