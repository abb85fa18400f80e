"""Compilation of the training step for GPUs on a machine that has none.

    JAX_PLATFORMS=cpu python ...

    mesh = build_mesh(sizes, gpu_topology("H100", 3072))
    compiled = step.lower(abstract_state, abstract_batch).compile()
    compiled.memory_analysis(), collectives(compiled, mesh)

    print(compile_plan(plan(config, gpu="h100", gpus=128)))

The compiler is that of JAX's CUDA plugin, with a description of the GPU. Neither GPU nor driver is needed, and the
program cannot run. The plugin reports on stderr that it found no driver (`cuInit`), which is harmless. Without a device
nothing is autotuned, so the memory analysis lacks the scratch of tuned kernels; as always, it also lacks the buffers of
NCCL (1-2 GiB), the CUDA context (0.5-0.9 GiB) and fragmentation.

`compile_plan` compiles in a process of its own, so that a message remains if the compiler crashes, or if the system
kills it for using too much memory. That process runs this module, which reads a pickled request from stdin and writes
one line of JSON.
"""

from __future__ import annotations

import json
import math
import os
import pickle
import signal
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from fractions import Fraction
from importlib.util import find_spec
from resource import RUSAGE_CHILDREN, RUSAGE_SELF, getrusage
from typing import Any, NamedTuple

import jax
from jax.experimental import topologies
from jax.sharding import AbstractMesh

from megajax.config import Config, InputError
from megajax.config.cli import entry_point
from megajax.costs.device import Device
from megajax.costs.gpu_settings import compiler_options, gpu_type
from megajax.costs.hardware import GPUS, Gpu
from megajax.models.families import batch_arrays
from megajax.parallel.kernels import choose_attention
from megajax.parallel.mesh import build_mesh, simulate_devices
from megajax.parallel.rules import Rules
from megajax.planning.collectives import Collective, Traffic, collectives
from megajax.planning.compiled import SIMULATED, CompiledPlan, Sends
from megajax.planning.hlo import executed_flops
from megajax.planning.plan import Plan
from megajax.planning.profile.profile import Profile
from megajax.training.batches import batch_shardings
from megajax.training.schedule import Schedule
from megajax.training.step import build_init, build_train_step

XLA_FRACTION = 0.8
"""Share of a GPU's memory that XLA plans with if no client tells it the size of its allocator, as JAX does on a GPU."""
TARGETS = {gpu.name: gpu for gpu in GPUS if gpu.chip}
"""GPUs that can be described to XLA's compiler, by name."""


def has_compiler() -> bool:
    """Tell whether JAX's CUDA plugin, which compiles for GPUs, is installed."""
    return any(find_spec(f"jax_cuda{version}_plugin") for version in (12, 13))


def gpu_topology(name: str, devices: int, gpus_per_host: int = 8) -> list[jax.Device]:
    """Return devices of which a mesh can be built to compile for, ordered by host.

    Without a GPU, `JAX_PLATFORMS=cpu` must be set before JAX looks for devices.

    Args:
        name: key of TARGETS.
        devices: number of GPUs, which fills whole hosts or a part of one.
        gpus_per_host: number of GPUs that share a host.

    Raises:
        InputError: the GPU is unknown, a host is not full, or there is no CUDA plugin.
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
    """Return XLA's `stream_executor.GpuTargetConfigProto` as text.

    Values that are not in the table of GPUs are the same on all GPUs.

    The memory is chosen so that XLA plans with the memory that the launcher gives JAX; with less, XLA repeats
    collectives to save memory.
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


CHILD = ("-m", "megajax.planning.deviceless")
"""Arguments with which Python becomes the compiling process."""
MOST_SIMULATED = 64
"""Largest number of simulated devices.

Compiling for more takes minutes and tells little.
"""


class CompiledStep(NamedTuple):
    """A training step that is compiled and cannot run."""

    step: jax.stages.Compiled
    rules: Rules
    state: Any
    """Shapes, dtypes and shardings of the train state."""
    batch: Any
    """Shapes, dtypes and shardings of a batch."""
    seconds: float
    """Seconds that tracing, lowering and compiling took."""


def compile_plan(plan: Plan, flags: Sequence[str] = ()) -> CompiledPlan:
    """Compile a plan's step for its GPU, or for simulated CPU devices where JAX's CUDA plugin is missing.

    Args:
        plan: plan of the step.
        flags: flags of XLA such as "--xla_gpu_enable_latency_hiding_scheduler=false", besides those of XLA_FLAGS.

    Raises:
        InputError: the GPU is not a compile target, there are too many devices to simulate, or the compiler died.
    """
    if plan.gpus > MOST_SIMULATED and not has_compiler():
        raise InputError(
            f"compiling for {plan.gpus:,} GPUs needs JAX's CUDA plugin (pip install 'megajax[cuda13]'); simulated CPU "
            f"devices do for {MOST_SIMULATED} at most"
        )
    child = subprocess.run(
        [sys.executable, *CHILD],
        input=pickle.dumps((plan.config, plan.gpu.name)),
        capture_output=True,
        env=os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": " ".join((os.environ.get("XLA_FLAGS", ""), *flags))},
        check=False,
    )
    if child.returncode:
        raise InputError(describe_death(child.returncode, child.stderr.decode(errors="replace")))
    answer = json.loads(child.stdout.splitlines()[-1])
    sends = tuple(
        Sends(**kind | {"axes": tuple(kind["axes"]), "loop": tuple(kind["loop"])}) for kind in answer.pop("sends")
    )
    text = answer.pop("program")
    profile = _profile(plan, text) if text else None
    return CompiledPlan(plan, sends=sends, unused=tuple(answer.pop("unused")), profile=profile, **answer)


def _profile(plan: Plan, text: str) -> Profile:
    """Return the profile of a compiled plan; branches of a pipeline are taken in a share of the steady ticks."""
    load, share = Device.of(plan.config).load, _head_share(plan.config)
    mesh = AbstractMesh(tuple(plan.mesh.values()), tuple(plan.mesh))

    def taken(source: str) -> Fraction:
        return share if "steady_ticks" in source else Fraction(0)

    return Profile.of(text, plan.gpu, mesh, taken, load and load.blocks)


def describe_death(code: int, errors: str) -> str:
    """Return a message on why the compiling process ended, and what to do.

    Args:
        code: exit code of the process, negative for a signal.
        errors: text that it wrote to stderr.
    """
    last = (errors.strip().splitlines() or ["it wrote nothing"])[-1]
    if code == 2:
        return last.removeprefix("megajax: error: ")
    if code == -signal.SIGKILL:
        return (
            "the compiler was killed, as the system does when memory runs out: give it more, or plan without --compile"
        )
    how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"failed with exit code {code}"
    return f"the compiler {how} ({last}): try another layout, or plan without --compile"


def compile_step(config: Config, gpu: str) -> CompiledStep:
    """Compile the training step for GPUs of the given name, as many as the layout takes, with the launcher's settings.

    Args:
        config: configuration with the whole mesh in `parallel`, and a known vocabulary.
        gpu: name in `planning.deviceless.TARGETS`.

    Raises:
        InputError: the GPU is not a compile target, or there is no CUDA plugin.
    """
    start = time.perf_counter()
    devices = gpu_topology(gpu, math.prod(config.parallel.sizes.values()))
    step, rules, state, batch = abstract_step(config, devices, "gpu")
    compiled = step.lower(state, batch).compile(compiler_options=compiler_options(gpu_type(gpu)))
    return CompiledStep(compiled, rules, state, batch, time.perf_counter() - start)


def abstract_step(config: Config, devices: Sequence[jax.Device], platform: str) -> tuple[Any, Rules, Any, Any]:
    """Build the jitted training step for a platform ("gpu" or "cpu"), its rules, and an abstract state and batch."""
    rules = Rules.of(build_mesh(config.parallel.sizes, devices), config.parallel, config.model)
    size = config.train.global_batch_size
    arrays = batch_arrays(config.model, config.data)
    attention = choose_attention(config, platform, arrays).name
    step = build_train_step(config, rules, Schedule.from_config(config.optim, size, size), attention)
    _, abstract, shardings = build_init(config, rules)
    state = jax.tree.map(lambda x, at: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=at), abstract, shardings)
    rows = (Device.of(config).microbatches, size // Device.of(config).microbatches)
    batch = {
        name: jax.ShapeDtypeStruct((*rows, *arrays[name].shape), arrays[name].dtype, sharding=at)
        for name, at in batch_shardings(rules, config.model, config.data).items()
    }
    return step, rules, state, batch


@entry_point
def main(argv: list[str]) -> None:
    """Run the compiling process, which takes no arguments."""
    config, gpu = pickle.load(sys.stdin.buffer)
    compiled = compile_step(config, gpu) if has_compiler() else _simulate(config)
    plan = compiled.step.memory_analysis()
    assert plan is not None
    device = compiled.rules.mesh.devices.flat[0]
    simulated = device.platform == "cpu"
    load, share = Device.of(config).load, _head_share(config)
    answer = {
        "target": SIMULATED if simulated else device.device_kind,
        "memory": {
            "arguments": plan.argument_size_in_bytes,
            "outputs": plan.output_size_in_bytes - plan.alias_size_in_bytes,
            "temporary": plan.temp_size_in_bytes,
            "code": plan.generated_code_size_in_bytes,
        },
        "sends": [vars(sends) for sends in _sends(collectives(compiled.step, compiled.rules.mesh), share)],
        "flops": None if simulated else executed_flops(compiled.step, load and load.blocks, share),
        "unused": unused_inputs(compiled),
        "program": "" if simulated else compiled.step.as_text(),
        "seconds": compiled.seconds,
        "host_bytes": 1024 * max(getrusage(who).ru_maxrss for who in (RUSAGE_SELF, RUSAGE_CHILDREN)),
    }
    print(json.dumps(answer))


def _sends(traffic: Traffic, share: Fraction) -> Iterator[Sends]:
    """Sum up the collectives of a program by kind; steady ticks take a share of the branches.

    The branches of a pipeline contain the work at the start or end of a microbatch (embedding, head, the embedding's
    gradient), so each is taken as often as there are microbatches. Each has its code in the loop over the steady ticks,
    and perhaps a second time in that of warm-up or cool-down.
    """
    kinds: defaultdict[tuple[Any, ...], list[Collective]] = defaultdict(list)
    for record in traffic:
        kinds[record.op, record.axes, record.loop, record.place, record.conditional].append(record)
    for (op, axes, loop, place, conditional), records in kinds.items():
        taken = [
            record.count * record.bytes * (share * ("steady_ticks" in record.source) if conditional else 1)
            for record in records
        ]
        yield Sends(
            op,
            axes,
            loop,
            place,
            conditional,
            count=sum(record.count for record in records),
            bytes=sum(record.count * record.bytes for record in records),
            largest=max(record.bytes for record in records),
            taken=float(sum(taken)),
        )


def _head_share(config: Config) -> Fraction:
    """Return the share of steady ticks in which a microbatch leaves the pipeline; only these run the head."""
    schedule = Device.of(config).schedule
    return Fraction(schedule.microbatches, schedule.steady_ticks)


def unused_inputs(compiled: CompiledStep) -> list[str]:
    """Return the names of the inputs that JAX left out of the program, because no result depends on them."""
    (state, batch), _ = compiled.step.input_shardings
    given, kept = ({"state": compiled.state, "batch": compiled.batch}, {"state": state, "batch": batch})
    names = [
        [jax.tree_util.keystr(path, simple=True, separator=".") for path, _ in jax.tree.leaves_with_path(tree)]
        for tree in (given, kept)
    ]
    return [name for name in names[0] if name not in set(names[1])]


def _simulate(config: Config) -> CompiledStep:
    simulate_devices(math.prod(config.parallel.sizes.values()))
    start = time.perf_counter()
    step, rules, state, batch = abstract_step(config, jax.devices(), "cpu")
    compiled = step.lower(state, batch).compile()
    return CompiledStep(compiled, rules, state, batch, time.perf_counter() - start)


if __name__ == "__main__":
    sys.exit(main())
