"""The real step of a plan, compiled in a process of its own, for a GPU that is not there or simulated devices."""

import signal
from dataclasses import replace

import pytest
from jsonschema import Draft202012Validator

from megajax.config import Config, ConfigError, DataConfig, ModelConfig, ParallelConfig, TrainConfig
from megajax.planning.compiled import SIMULATED, CompiledPlan
from megajax.planning.deviceless import has_compiler
from megajax.planning.plan import plan
from megajax.planning.schema import SCHEMA
from megajax.training import deviceless_step
from megajax.training.deviceless_step import compile_plan, describe_death

TINY = Config(
    model=ModelConfig(num_layers=4, hidden_size=128, num_heads=2, max_positions=256, vocab_size=1024),
    data=DataConfig(seq_length=256),
    train=TrainConfig(steps=1, global_batch_size=8, micro_batch_size=2, precision="bf16"),
    parallel=ParallelConfig(data=1, fsdp=2, tensor=2),
)


def check(compiled: CompiledPlan, target: str) -> None:
    """State is that of the closed form, and every matrix of every layer is gathered, forward and backward."""
    assert compiled.target == target
    assert compiled.memory["arguments"] == pytest.approx(compiled.plan.stages["first"].persistent, rel=0.01)
    assert compiled.fits
    assert compiled.bytes_by_axis.keys() == {"fsdp", "tensor"}
    gathers = [s for s in compiled.sends if s.op == "all-gather" and s.axes == ("fsdp",) and s.loop == (2, 4)]
    assert sum(s.count for s in gathers) >= 2 * 2 * 4 * 4  # M, forward and backward, L, matrices
    assert compiled.host_bytes > 1e8
    Draft202012Validator(SCHEMA["properties"]["compiled"]).validate(compiled.as_dict())


@pytest.mark.skipif(not has_compiler(), reason="compiling for a GPU that is not there needs the CUDA plugin")
def test_for_a_gpu():
    """Closed form and XLA agree on bytes over every axis as well."""
    compiled = compile_plan(plan(TINY, "a100-80gb"))
    check(compiled, "NVIDIA A100-SXM4-80GB")
    sent = {axis: sent.bytes for axis, sent in compiled.plan.communication.items()}
    assert compiled.bytes_by_axis == pytest.approx(sent, rel=0.05)


@pytest.mark.skipif(has_compiler(), reason="the CUDA plugin compiles for the GPU itself")
def test_for_simulated_devices():
    compiled = compile_plan(plan(TINY))
    check(compiled, SIMULATED)
    shown = str(compiled).splitlines()
    assert shown[0].startswith("compiled for 4 x simulated CPU in ")
    assert "no CUDA plugin: another compiler, without GPU kernels" in shown[0]
    assert shown[1].startswith("XLA plans ")
    assert shown[2].split() == ["GiB", "closed", "form", "XLA", "difference"]


@pytest.mark.skipif(has_compiler(), reason="the CUDA plugin compiles for the GPU itself")
def test_too_many_devices_to_simulate():
    many = replace(TINY, parallel=ParallelConfig(data=128), train=replace(TINY.train, global_batch_size=256))
    with pytest.raises(ConfigError, match=r"128 GPUs needs JAX's CUDA plugin .* do for 64 at most"):
        compile_plan(plan(many))


@pytest.mark.skipif(not has_compiler(), reason="without the CUDA plugin devices are simulated, whatever the GPU")
def test_a_gpu_that_is_no_target():
    with pytest.raises(ConfigError, match="no compile target 'H100-NVL': choose one of A100-80GB, H100, H200"):
        compile_plan(plan(TINY, "h100-nvl"))


def test_a_compiler_that_dies(monkeypatch: pytest.MonkeyPatch):
    """A child that the system kills: `python -c` in its place, which kills itself."""
    monkeypatch.setattr(deviceless_step, "CHILD", ("-c", "import os; os.kill(os.getpid(), 9)"))
    with pytest.raises(ConfigError, match="the compiler was killed, as the system does when memory runs out"):
        compile_plan(plan(TINY))


@pytest.mark.parametrize(
    ("code", "errors", "message"),
    [
        (2, "noise\nmegajax: error: no such target\n", "no such target"),
        (-signal.SIGSEGV, "noise\nhere\n", "the compiler was ended by SIGSEGV (here): try another layout"),
        (1, "", "the compiler failed with exit code 1 (it wrote nothing): try another layout"),
    ],
)
def test_how_it_died(code: int, errors: str, message: str):
    assert describe_death(code, errors).startswith(message)
