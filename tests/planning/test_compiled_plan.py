"""The real step of a plan, compiled in a process of its own for an absent GPU or for simulated devices."""

import re
import signal
from dataclasses import replace

import pytest
from jsonschema import Draft202012Validator

from megajax.config import Config, DataConfig, InputError, ModelConfig, ParallelConfig, TrainConfig
from megajax.plan import DIFFERS, main
from megajax.planning import deviceless
from megajax.planning.collectives import PLACES
from megajax.planning.compiled import SIMULATED, TOLERANCE, CompiledPlan
from megajax.planning.deviceless import compile_plan, describe_death, has_compiler
from megajax.planning.plan import plan
from megajax.planning.profile.compare import compare
from megajax.planning.profile.trace import trace_events
from megajax.planning.schema import SCHEMA
from tests.planning.contracts import breaches, contract

pytestmark = pytest.mark.slow

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


needs_compiler = pytest.mark.skipif(
    not has_compiler(), reason="compiling for a GPU that is not there needs the CUDA plugin"
)


@pytest.fixture(scope="module")
def compiled() -> CompiledPlan:
    return compile_plan(plan(TINY, "a100-80gb"))


@needs_compiler
def test_for_a_gpu(compiled: CompiledPlan):
    """Closed form and XLA agree on bytes over every axis, and on FLOPs; without dropout no sample has a key."""
    assert compiled.differences == ()
    assert compiled.flops == pytest.approx(compiled.plan.time.compiled_flops, rel=0.02)
    assert compiled.unused == ("batch.sample_ids",)
    check(compiled, "NVIDIA A100-SXM4-80GB")
    sent = {axis: sent.bytes for axis, sent in compiled.plan.communication.items()}
    assert compiled.bytes_by_axis == pytest.approx(sent, rel=0.05)


@needs_compiler
def test_its_profile_adds_up(compiled: CompiledPlan):
    """Parts and loops are the step; products, bytes over axes and arrays held are those that XLA's own counts give."""
    profile = compiled.profile
    assert dict(profile.timeline.uncounted) == {}
    assert sum(profile.parts.values()) == pytest.approx(profile.seconds)
    assert sum(profile.places.values()) == pytest.approx(profile.seconds)
    assert sum(profile.lines.values()) == pytest.approx(profile.seconds)
    spans = profile.timeline.spans
    assert sum(span.times * span.price.flops for span in spans) == compiled.flops
    sent = {
        axis: sum(span.times * span.price.bytes for span in spans if axis in span.price.axes)
        for axis in compiled.bytes_by_axis
    }
    assert sent == compiled.bytes_by_axis
    assert profile.peak.bytes == pytest.approx(compiled.memory["temporary"], rel=0.1)
    assert any(line.startswith("megajax/models/layers.py:") for line in profile.lines)


@needs_compiler
def test_a_trace_has_every_instruction_and_the_turns_of_loops(compiled: CompiledPlan):
    """The 4 layers of the 2 microbatches are drawn once, and the other turns are one block that ends where they end."""
    events = trace_events(compiled.profile)
    blocks = [event for event in events if event["ph"] == "X"]
    spans = compiled.profile.timeline.spans
    assert {event["name"] for event in blocks} >= {span.instruction.name for span in spans}
    turns = [event for event in blocks if "more turns of" in event["name"]]
    assert sorted({event["name"].split()[0] for event in turns}) == ["1", "3"]
    assert max(event["ts"] + event["dur"] for event in blocks) == pytest.approx(1e6 * compiled.profile.seconds)
    assert len({e["args"]["bytes"] for e in events if e["ph"] == "C"}) > 10


@needs_compiler
def test_two_profiles_are_compared_line_by_line(compiled: CompiledPlan):
    """Full recomputation holds less and multiplies more; a flag of XLA takes its effect in the program."""
    again = compile_plan(
        plan(replace(TINY, train=replace(TINY.train, remat="full")), "a100-80gb"),
        ["--xla_gpu_enable_latency_hiding_scheduler=false"],
    )
    both = compiled.profile, again.profile
    rows = {row[:32].strip(): row[32:].split() for row in compare(*both).splitlines()}
    assert rows["matrix products"][4].startswith("+")
    assert rows["temporary memory"][4].startswith("-")
    before, after = (hidden / (hidden + exposed) for hidden, exposed in (x.transfers["tensor"] for x in both))
    assert after < before


@needs_compiler
def test_bytes_in_another_loop_are_named(compiled: CompiledPlan):
    """As many bytes over `fsdp`, but all of them at the end of the step: none where they were planned, all there."""
    moved = tuple(replace(s, place="each step") if s.axes == ("fsdp",) else s for s in compiled.sends)
    names = [
        re.sub(r" [\d.]+ MiB instead of [\d.]+ MiB", "", words) for words in replace(compiled, sends=moved).differences
    ]
    assert names == [f"over fsdp, {place}" for place in PLACES]


@needs_compiler
def test_what_is_not_planned_is_no_difference():
    """Muon multiplies and sends at the end of a step, which the plan leaves out and says so; the loops are judged."""
    compiled = compile_plan(plan(replace(TINY, optim=replace(TINY.optim, name="muon"))))
    once = [name for name in compiled.comparison if name.endswith("each step")]
    assert compiled.differences == ()
    assert {f"over {axis}, each step" for axis in ("fsdp", "tensor")} == set(once)
    assert all(compiled.differs(name, TOLERANCE) for name in (*once, "products"))
    assert str(compiled).count("not planned") == 3


@needs_compiler
def test_a_pipelines_branches_count_as_often_as_they_are_taken():
    """Embedding and head run for 4 microbatches, in branches of 3 ticks of warm-up and 6 steady ones."""
    layout = ParallelConfig(data=1, pipe=2, chunks=2, tensor=2)
    compiled = compile_plan(plan(replace(TINY, parallel=layout)))
    assert {s.loop[0] for s in compiled.sends if s.conditional} == {3, 6}
    assert compiled.differences == ()
    names = ("over pipe, each microbatch", "over tensor, each microbatch", "products")
    judged = {name: compiled.deviation(name) for name in names}
    print(judged)
    assert all(0 < abs(off) < 0.02 for name, off in judged.items() if name != "products")  # 0 would be a clamp's
    assert abs(judged["products"]) < 0.01


@pytest.mark.skipif(has_compiler(), reason="the CUDA plugin compiles for the GPU itself")
def test_for_simulated_devices():
    compiled = compile_plan(plan(TINY))
    check(compiled, SIMULATED)
    assert (compiled.differences, compiled.flops) == ((), None)
    shown = str(compiled).splitlines()
    assert shown[0].startswith("compiled for 4 x simulated CPU in ")
    assert "no CUDA plugin: another compiler, without GPU kernels: memory and collectives are not judged" in shown[0]
    assert shown[1].startswith("XLA plans ")
    assert shown[2].split() == ["a", "device", "closed", "form", "XLA", "difference"]


@pytest.mark.skipif(has_compiler(), reason="the CUDA plugin compiles for the GPU itself")
def test_too_many_devices_to_simulate():
    many = replace(TINY, parallel=ParallelConfig(data=128), train=replace(TINY.train, global_batch_size=256))
    with pytest.raises(InputError, match=r"128 GPUs needs JAX's CUDA plugin .* do for 64 at most"):
        compile_plan(plan(many))


@pytest.mark.skipif(not has_compiler(), reason="without the CUDA plugin devices are simulated, whatever the GPU")
def test_a_gpu_that_is_no_target():
    with pytest.raises(InputError, match="no compile target 'H100-NVL': choose one of A100-80GB, H100, H200"):
        compile_plan(plan(TINY, "h100-nvl"))


def test_a_compiler_that_dies(monkeypatch: pytest.MonkeyPatch):
    """A child that the system kills: `python -c` in its place, which kills itself."""
    monkeypatch.setattr(deviceless, "CHILD", ("-c", "import os; os.kill(os.getpid(), 9)"))
    with pytest.raises(InputError, match="the compiler was killed, as the system does when memory runs out"):
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


@needs_compiler
@pytest.mark.parametrize(
    ("family", "layout"), [("LLaMA", "tensor 8"), ("GPT", "fsdp 8"), ("BLOOM", "pipe 2 x tensor 4")]
)
def test_a_family_keeps_its_contract(family: str, layout: str):
    """The cheapest of them; one with a tied table gathered over `fsdp`; one with stages, which takes half a minute.

    `python -m bench.contracts` compiles all families in all layouts.
    """
    compiled = contract(family, layout)
    print(f"\n{family}, {layout}: {compiled}")
    assert list(breaches(family, compiled)) == []


FLATTENED = """
import sys
from megajax.models import feed_forward
from megajax.planning import deviceless

def linear(x, weight):
    y = x @ weight.reshape(len(weight), -1)
    return y.reshape(*y.shape[:-1], *weight.shape[1:])

feed_forward.linear = linear
sys.exit(deviceless.main())
"""
"""A compiling process in which F, which `tensor` cuts, is inside a flat dim of gate and up."""


@needs_compiler
def test_a_program_that_is_not_what_was_planned(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    """A gated MLP whose weight has to be gathered over `tensor`, and whose gradient every device computes whole."""
    monkeypatch.setattr(deviceless, "CHILD", ("-c", FLATTENED))
    shape = (
        "model.num_layers=2 model.hidden_size=1024 model.num_heads=8 model.num_kv_heads=8 model.ffn_hidden_size=4096"
    )
    batch = "data.seq_length=512 train.global_batch_size=2 train.micro_batch_size=1 train.precision=bf16"
    words = f"models/llama3_8b.yaml parallel.tensor=8 {shape} {batch} --compile".split()
    assert main(words) == DIFFERS
    (error,) = capsys.readouterr().err.splitlines()
    assert re.fullmatch(
        r"megajax: program and closed form differ: over tensor, layers forward [\d.]+ MiB instead of [\d.]+ MiB; "
        r"over tensor, layers backward [\d.]+ GiB instead of [\d.]+ MiB; products [\d.]+ TFLOP instead of [\d.]+ TFLOP",
        error,
    )


def test_what_a_single_microbatch_sends_is_what_a_step_sends(capsys: pytest.CaptureFixture[str]):
    """Its loop is unrolled, and the oldest XLA joins the sums of a step under the name of what they sum."""
    assert main(["quickstart", "--gpus", "2", "--compile", "train.micro_batch_size=8"]) == 0
    assert capsys.readouterr().err == ""


@needs_compiler
def test_two_variants_on_the_command_line(capsys: pytest.CaptureFixture[str]):
    """A flag of XLA stands without dashes, as options have them."""
    words = ["quickstart", "--gpus", "1", "train.precision=bf16", "--compare", "train.remat=full"]
    assert main([*words, "xla_gpu_enable_latency_hiding_scheduler=false train.remat=none"]) == 0
    shown = capsys.readouterr().out.splitlines()
    assert shown[0] == "A: train.remat=full"
    assert shown[1] == "B: xla_gpu_enable_latency_hiding_scheduler=false train.remat=none"
    (temporary,) = (line for line in shown if line.startswith("temporary memory"))
    assert temporary.split()[-2].startswith("+")
