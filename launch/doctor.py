"""`python -m launch.doctor [--directory DIR]`: is this machine fit to train?

A line for every check, "ok", "warn" or "FAIL", what was found, and what to do about it. Run it on every node before a
long run (`srun -l python -m launch.doctor`), in the environment that the run will have. It takes a minute and some GPU
memory. The exit code is 1 if a line says FAIL, else 0; without a GPU there is something to warn of, and nothing failed.
"""

from __future__ import annotations

import importlib.metadata
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np

from launch.gpus import query
from megajax.config import ClusterConfig
from megajax.config.cli import OneLineParser, entry_point

try:
    import jax
    import jax.numpy as jnp
    from jax.sharding import NamedSharding, PartitionSpec

    from megajax.cluster.detect import detect
    from megajax.costs.hardware import find_gpu
    from megajax.observe.throughput import measured_matmul_peak
except ImportError as error:
    sys.exit(f"FAIL  JAX cannot be imported: {error} (pip install '.[cuda13]', or without it on a machine without GPU)")

GIB = 2**30
PACKAGES = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy")
LEAST_DRIVER = {12: 525, 13: 580}
"""The oldest driver branch that works with each major version of CUDA (NVIDIA's compatibility guide)."""


class Verdict(NamedTuple):
    """One line of the report."""

    level: Literal["ok", "warn", "FAIL"]
    what: str
    remedy: str = ""

    def __str__(self) -> str:
        return f"{self.level:<5} {self.what}" + (f" ({self.remedy})" if self.remedy else "")


@entry_point
def main(argv: list[str]) -> int:
    """Run the command line and return its exit code."""
    parser = OneLineParser(prog="python -m launch.doctor", description=__doc__, allow_abbrev=False)
    parser.add_argument("--directory", type=Path, default=Path(), help="where checkpoints will go")
    options = parser.parse_args(argv)
    return examine([*CHECKS, lambda: check_disk(options.directory)])


def examine(checks: list[Callable[[], Iterator[Verdict]]]) -> int:
    """Run every check, print its lines, and return 1 if anything failed. A check that raises has failed."""
    failed = False
    for check in checks:
        try:
            for verdict in check():
                print(verdict, flush=True)
                failed = failed or verdict.level == "FAIL"
        except Exception as error:
            reason = " ".join(f"{type(error).__name__}: {error}".split())[:300]
            print(Verdict("FAIL", f"{getattr(check, '__name__', 'check')}: {reason}"), flush=True)
            failed = True
    return int(failed)


def check_versions() -> Iterator[Verdict]:
    """Check the versions of Python and the packages; the CUDA plugin must have jaxlib's version."""
    versions = {name: _version(name) for name in PACKAGES}
    listed = ", ".join(f"{name} {version}" for name, version in versions.items())
    yield Verdict("ok", f"Python {sys.version.split()[0]}, {listed}")
    plugins = [name for name in map("jax-cuda{}-plugin".format, LEAST_DRIVER) if _version(name)]
    for name in plugins:
        if _version(name) == versions["jaxlib"]:
            yield Verdict("ok", f"{name} {_version(name)}")
        else:
            yield Verdict("FAIL", f"{name} {_version(name)}, jaxlib {versions['jaxlib']}", "install the same version")
    if query("name") and not plugins:
        yield Verdict("FAIL", "there are GPUs, and no CUDA plugin", "pip install '.[cuda13]', or cuda12")


def check_driver() -> Iterator[Verdict]:
    """Check the driver's version, and whether another program uses the GPUs."""
    drivers = sorted(set(query("driver_version")))
    if not drivers:
        yield Verdict("warn", "no NVIDIA driver or GPU here", "nothing to do on a machine that simulates devices")
        return
    newest_plugin = max((major for major in LEAST_DRIVER if _version(f"jax-cuda{major}-plugin")), default=0)
    least = LEAST_DRIVER.get(newest_plugin, 0)
    old = [driver for driver in drivers if int(driver.split(".")[0]) < least]
    remedy = f"CUDA {newest_plugin} needs {least} or newer: update, or install an older plugin"
    yield Verdict("FAIL", f"driver {drivers}", remedy) if old else Verdict("ok", f"driver {', '.join(drivers)}")
    used = [text.removesuffix(" MiB") for text in query("memory.used")]
    if any(text.isdigit() and int(text) > 1024 for text in used):
        yield Verdict("warn", f"MiB of GPU memory in use already: {' '.join(used)}", "see nvidia-smi for by whom")


def check_nccl() -> Iterator[Verdict]:
    """Check that the library for collectives between GPUs is installed."""
    if not query("name"):
        return
    names = [name for name in ("nvidia-nccl-cu13", "nvidia-nccl-cu12") if _version(name)]
    if names:
        yield Verdict("ok", f"{names[0]} {_version(names[0])}")
    else:
        yield Verdict("warn", "no NCCL package", "one from the system has to be found instead, or install .[cuda13]")


def check_devices() -> Iterator[Verdict]:
    """Check that JAX finds every GPU that the driver has."""
    devices = jax.local_devices()
    found = f"JAX finds {len(devices)} x {devices[0].device_kind} ({devices[0].platform})"
    there = len(query("index"))
    if there and devices[0].platform != "gpu":
        yield Verdict(
            "FAIL", f"{found}, the driver {there} GPU(s)", "check CUDA plugin, JAX_PLATFORMS, LD_LIBRARY_PATH"
        )
    elif there > len(devices):
        yield Verdict("warn", f"{found} of {there}", "CUDA_VISIBLE_DEVICES hides the others")
    else:
        yield Verdict("ok", found)


def check_matmul() -> Iterator[Verdict]:
    """Measure a bf16 matrix product on every device and compare its speed with the data sheet."""
    if jax.default_backend() == "cpu":
        yield Verdict("ok", f"matrix product: {measured_matmul_peak('fp32', seconds=0.1) / 1e12:.3f} TFLOP/s in fp32")
        return
    for device in jax.local_devices():
        with jax.default_device(device):
            tflops = measured_matmul_peak("bf16", size=8192, seconds=1.0) / 1e12
        what = f"matrix product on {device}: {tflops:.0f} TFLOP/s in bf16"
        if (gpu := find_gpu(device.device_kind)) is None:
            yield Verdict("ok", f"{what}, peak of {device.device_kind} unknown")
            continue
        share = tflops / gpu.half_tflops
        remedy = "" if share > 0.5 else "hot, throttled or shared: nvidia-smi -q -d PERFORMANCE"
        yield Verdict("warn" if remedy else "ok", f"{what}, {share:.0%} of {gpu.name}'s peak", remedy)


def check_memory() -> Iterator[Verdict]:
    """Measure the memory that JAX may use and the speed of copies to it from the host."""
    device = jax.local_devices()[0]
    if limit := (device.memory_stats() or {}).get("bytes_limit"):
        yield Verdict("ok", f"JAX may use {limit / GIB:.1f} GiB of every device")
    data = np.ones(2**24 if device.platform == "cpu" else 2**29, np.float32)
    up = _seconds(lambda: jax.device_put(data, device).block_until_ready())
    on_device = jax.device_put(data, device)
    down = _seconds(lambda: np.asarray(on_device + 0))
    yield Verdict("ok", f"host to device {data.nbytes / up / 1e9:.1f} GB/s, back {data.nbytes / down / 1e9:.1f} GB/s")


def check_links() -> Iterator[Verdict]:
    """Measure an all-reduce between the devices of this process."""
    devices = jax.local_devices()
    if len(devices) == 1:
        return
    count, length = len(devices), 2**20 if devices[0].platform == "cpu" else 2**28
    sharding = NamedSharding(jax.make_mesh((count,), ("x",), devices=devices), PartitionSpec("x"))
    data = jax.device_put(jnp.ones((count, length), jnp.float32), sharding)
    total = jax.jit(lambda x: x.sum(0), out_shardings=NamedSharding(sharding.mesh, PartitionSpec()))
    if float(total(data)[-1]) != count:
        yield Verdict("FAIL", "an all-reduce gives a wrong sum", "do not train here")
        return
    seconds = _seconds(lambda: total(data).block_until_ready())
    speed = 2 * (count - 1) / count * 4 * length / seconds  # bytes that every device sends, and receives
    gpu = find_gpu(devices[0].device_kind)
    remedy = "" if gpu is None or speed > gpu.link_bandwidth / 4 else "no NVLink? see nvidia-smi topo -m"
    yield Verdict("warn" if remedy else "ok", f"all-reduce over {count} devices: {speed / 1e9:.1f} GB/s each", remedy)


def check_disk(directory: Path) -> Iterator[Verdict]:
    """Measure free space and speed of the directory for checkpoints."""
    directory.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(directory).free
    remedy = "" if free > 50 * GIB else "a checkpoint takes 12 to 16 bytes a parameter"
    yield Verdict("warn" if remedy else "ok", f"{directory.absolute()}: {free / GIB:.0f} GiB free", remedy)
    data = os.urandom(2**20) * 256
    with tempfile.TemporaryFile(dir=directory) as file:
        start = time.perf_counter()
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
        speed = len(data) / (time.perf_counter() - start)
    yield Verdict("ok", f"{directory.absolute()}: writes {speed / 1e6:.0f} MB/s")


def check_clock() -> Iterator[Verdict]:
    """Check that this node's clock was set: logs of nodes whose clocks differ cannot be read together."""
    what = time.strftime("time of day %Y-%m-%d %H:%M:%S UTC", time.gmtime())
    if time.time() < Path(jax.__file__).stat().st_mtime:
        yield Verdict("FAIL", f"{what}, before JAX was installed", "set the clock, and run chronyd")
    else:
        yield Verdict("ok", what)


def check_launcher() -> Iterator[Verdict]:
    """Say which place among several processes a run would find in this environment."""
    yield Verdict("ok", detect(os.environ, ClusterConfig()).describe())


CHECKS: tuple[Callable[[], Iterator[Verdict]], ...] = (
    check_versions, check_driver, check_nccl, check_devices, check_matmul, check_memory, check_links, check_clock,
    check_launcher,
)  # fmt: skip


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _seconds(action: Callable[[], object]) -> float:
    """Return the best time of three runs in seconds, after a first run that may compile."""
    times = []
    for _ in range(4):
        start = time.perf_counter()
        action()
        times.append(time.perf_counter() - start)
    return min(times[1:])


if __name__ == "__main__":
    sys.exit(main())
