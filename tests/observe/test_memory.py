"""Device memory is compared with the plan, and running out of it is explained."""

import logging

import jax
import jax.numpy as jnp
import pytest

from megajax.config.base import InputError
from megajax.observe import memory
from megajax.observe.memory import (
    GIB,
    DeviceMemory,
    MemoryWatch,
    describe_memory,
    device_memory,
    explain_out_of_memory,
    explained_out_of_memory,
    planned_bytes,
    requested_bytes,
)

USED = DeviceMemory(in_use=20 * GIB, peak=60 * GIB, limit=72 * GIB)


def test_line_of_a_device():
    assert describe_memory(USED, 58 * GIB) == (
        "memory: 20.000 GiB in use, 60.000 GiB at most of 72.000 GiB a device; the step is planned to take 58.000 GiB"
    )


def test_a_cpu_reports_the_process_instead(capsys):
    assert device_memory() is None
    watch = MemoryWatch()
    watch.planned = GIB
    assert watch.look() == {}
    watch.look()
    text = capsys.readouterr().out
    assert text.startswith("memory: n/a on this device (this process at most ")
    assert text.endswith("GiB); the step is planned to take 1.000 GiB\n") and text.count("\n") == 1


@pytest.mark.parametrize(("planned", "warns"), [(None, False), (55 * GIB, False), (50 * GIB, True)])
def test_a_peak_well_above_the_plan_is_a_warning(monkeypatch, caplog, planned, warns):
    monkeypatch.setattr(memory, "device_memory", lambda: USED)  # what no CPU can tell
    watch = MemoryWatch()
    watch.planned = planned
    assert watch.look() == {"memory-peak-gib": 60.0}
    with caplog.at_level(logging.WARNING):
        watch.look()
    assert ("20 % above the plan" in caplog.text) == warns


def test_plan_of_a_compiled_step():
    """Donated state [1024] in fp32, batch [256], and a scalar that comes out."""
    state, batch = jnp.zeros(1024), jnp.zeros(256)
    step = jax.jit(lambda state, batch: (state + batch.sum(), batch.max()), donate_argnums=0)
    assert planned_bytes(step.lower(state, batch).compile()) >= 4 * (1024 + 256 + 1)


@pytest.mark.parametrize(
    ("message", "needed"),
    [
        ("RESOURCE_EXHAUSTED: Out of memory while trying to allocate 4770354232 bytes.\nBufferAssign", 4770354232),
        ("RESOURCE_EXHAUSTED: Out of memory while trying to allocate 19.59GiB. [executable_name='s']", 21034602332),
        ("RESOURCE_EXHAUSTED: Out of memory while trying to allocate 896.00MiB with allocator GPU_0_bfc", 939524096),
        ("RESOURCE_EXHAUSTED: Failed to allocate request for 6.27GiB (6727663616B) on device ordinal 0", 6727663616),
        ("RESOURCE_EXHAUSTED: Out of memory allocating 70368744177664 bytes.", 70368744177664),
        ("RESOURCE_EXHAUSTED: [0] Failed to load in-memory CUBIN: CUDA_ERROR_OUT_OF_MEMORY: out of memory", None),
    ],
)
def test_messages_of_xla(message, needed):
    """What XLA says on GPUs, old and new, and on CPUs."""
    assert requested_bytes(message) == needed
    assert explain_out_of_memory(message, USED).startswith("out of memory: a device needs ")


def test_needed_and_available_bytes():
    message = "RESOURCE_EXHAUSTED: Out of memory while trying to allocate 67243081728 bytes."
    assert explain_out_of_memory(message, USED) == (
        "out of memory: a device needs 67,243,081,728 bytes (62.62 GiB) more, 55,834,574,848 bytes (52.00 GiB) of "
        "72.00 GiB are available: lower train.micro_batch_size, raise parallel.fsdp, parallel.tensor or parallel.pipe, "
        "or set train.remat=full"
    )


def test_running_out_of_memory_is_one_line():
    """A real failure: 64 TiB."""
    step = jax.jit(lambda x: jnp.sort(x * jnp.ones(2**44)))
    both = r"needs 70,368,744,177,664 bytes \(65536.00 GiB\) more, [\d,]+ bytes"
    with pytest.raises(InputError, match=both), explained_out_of_memory():
        step(1.0).block_until_ready()


def test_other_errors_pass():
    with pytest.raises(jax.errors.JaxRuntimeError, match="no such thing"), explained_out_of_memory():
        raise jax.errors.JaxRuntimeError("INTERNAL: no such thing")
