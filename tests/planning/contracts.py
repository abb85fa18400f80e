"""The contract of a compiled step: families, layouts, and the allowed deviation of a program from the closed form.

`python -m bench.contracts` prints all of them; the test suite checks some.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import jax

from megajax.costs.device import Device, head_matrices
from megajax.costs.memory import GIB
from megajax.planning.compiled import TINY, CompiledPlan
from megajax.planning.deviceless import compile_plan
from megajax.planning.plan import Plan, plan
from tests.planning.compiled_memory import published


@dataclass(frozen=True)
class Family:
    """One preset for its kind of model."""

    preset: str
    unused: tuple[str, ...]
    """Inputs that its step does not use: without dropout no sample needs a key."""
    refused: tuple[str, ...] = ("expert 4 x tensor 2",)
    """Layouts that it cannot have."""


LAYOUTS = {
    "tensor 8": "parallel.tensor=8",
    "tensor 4 x fsdp 2": "parallel.tensor=4 parallel.fsdp=2",
    "pipe 2 x tensor 4": "parallel.pipe=2 parallel.tensor=4",
    "fsdp 8": "parallel.fsdp=8",
    "expert 4 x tensor 2": "parallel.expert=4 parallel.tensor=2",
}
FAMILIES = {
    "GPT": Family("gpt3_6.7b", ("batch.sample_ids",)),
    "LLaMA": Family("llama3.1_8b", ("batch.sample_ids",)),
    "Gemma 2": Family("gemma2_2b", ("batch.sample_ids",), refused=("tensor 8", "expert 4 x tensor 2")),
    "Qwen3": Family("qwen3_8b", ("batch.sample_ids",)),
    "BLOOM": Family("bloom_7b1", ("batch.positions", "batch.sample_ids")),  # ALiBi knows places alone
    "Mixtral": Family("mixtral_8x7b", ("batch.sample_ids",), refused=()),
    "BERT": Family("bert_large", ()),
    "T5": Family("t5_3b", (), refused=("pipe 2 x tensor 4", "expert 4 x tensor 2")),
}
LAYERS, MICROBATCHES = 4, 3
FLOPS, TRAFFIC, MEMORY, MEMORY_GIB = 0.02, 0.02, 0.10, 0.5
"""Most relative difference; memory may also differ by so many GiB."""


def contract(family: str, layout: str) -> CompiledPlan:
    """A family's step in a layout: a few layers, a few microbatches of one sample of 2,048 tokens (BERT, T5: 512)."""
    kind, words = FAMILIES[family], LAYOUTS[layout].split()
    replicas = 1
    for word in words:
        axis, _, size = word.removeprefix("parallel.").partition("=")
        replicas *= int(size) if axis in ("fsdp", "expert") else 1
    short = "data.seq_length=512" if family in ("BERT", "T5") else "data.seq_length=2048"
    words += [f"model.num_layers={LAYERS}", short, "train.micro_batch_size=1", "train.precision=bf16"]
    words += [f"train.global_batch_size={MICROBATCHES * replicas}"]
    return compile_plan(plan(published(kind.preset, " ".join(words)), "h100"))


def hoisted(whole: Plan) -> dict[str, float]:
    """Bytes that XLA of JAX 0.12 moves: it gathers BERT's [D, D] matrices before the loop over microbatches, once."""
    model, microbatches = whole.config.model, Device.of(whole.config).microbatches
    if model.family != "bert" or whole.mesh["fsdp"] == 1 or whole.mesh["pipe"] > 1 or jax.__version_info__ < (0, 12):
        return {}
    once = 2 * head_matrices(model) * model.hidden_size**2
    return {"over fsdp, each microbatch": -microbatches * once, "over fsdp, each step": once}


def breaches(family: str, compiled: CompiledPlan) -> Iterator[str]:
    """How a compiled program breaks its contract, in words."""
    moved = hoisted(compiled.plan)
    for name, (planned, xla) in compiled.comparison.items():
        closed = planned + moved.get(name, 0)
        off = compiled.deviation(name)
        if name in ("state", "temporary"):
            if abs(xla - closed) > max(MEMORY * closed, MEMORY_GIB * GIB):
                yield f"{name} {off:+.1%}"
        elif abs(xla - closed) > max((FLOPS if name == "products" else TRAFFIC) * closed, TINY):
            yield f"{name} {off:+.1%}"
    config = compiled.plan.config
    sequence = max(config.data.seq_length, config.data.decoder_seq_length if config.model.family == "t5" else 0)
    stream = 2 * sequence * config.model.hidden_size * config.parallel.expert
    for sends in compiled.sends:
        if "tensor" in sends.axes and len(sends.loop) > 1 and sends.largest > stream:  # in a layer
            yield f"{sends.op} of {sends.largest / GIB:.3f} GiB over tensor, where activations have {stream / GIB:.3f}"
    profile = compiled.profile
    assert profile is not None
    if profile.timeline.uncounted:
        yield f"not understood: {', '.join(profile.timeline.uncounted)}"
    if abs(profile.peak.bytes - compiled.memory["temporary"]) > max(MEMORY * profile.peak.bytes, MEMORY_GIB * GIB):
        yield f"held at the peak {profile.peak.bytes / GIB:.2f} GiB, XLA {compiled.memory['temporary'] / GIB:.2f}"
    products = sum(span.times * span.price.flops for span in profile.timeline.spans)
    if abs(products - (compiled.flops or 0)) > FLOPS * products:
        yield f"profiled {products:.4g} FLOPs of {compiled.flops:.4g}"
    if compiled.unused != FAMILIES[family].unused:
        yield f"not used: {', '.join(compiled.unused)}"
