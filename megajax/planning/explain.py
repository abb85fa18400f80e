"""What one parameter makes the devices send: why it lies as it does, and the collectives of a step that follow from it.

Bytes are of whole tensors, as in `planning.collectives`. Counts are of one device; a pipeline's devices send in the
ticks in which it fills and drains as well.

Letters: T tokens of a micro batch on a device, D embed; P stages, v chunks per stage, M microbatches, L layers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from math import prod

from megajax.config import Config
from megajax.parallel.rules import Rule
from megajax.planning.layouts import microbatches

FP32 = 4


@dataclass(frozen=True)
class Cause:
    """One collective that a parameter causes."""

    what: str
    op: str
    axis: str
    """Mesh axis."""
    count: int
    """Executions in a step."""
    bytes: float
    """Of one."""


def causes(
    config: Config, mesh: Mapping[str, int], name: str, shape: tuple[int, ...], rules: tuple[Rule, ...]
) -> list[Cause]:
    """Collectives of a step that a parameter causes.

    Args:
        config: with a known vocabulary; its layout is that of the mesh.
        mesh: size of every axis.
        name: of the parameter.
        shape: of the whole parameter.
        rules: of its dimensions.
    """
    layered = "layers" in (rule.logical for rule in rules)
    of_weights = _in_a_layer(config, mesh, shape, rules) if layered else _outside(config, mesh, shape, rules)
    if name == "word_embedding" and config.model.tied_head:
        of_weights = [replace(cause, count=2 * cause.count) for cause in of_weights]
    held = prod(shape) / prod(mesh[axis] for axis in _at_rest(rules) - {"data"})  # during a step
    sending = [*of_weights, *_once(config, held, rules), *_of_activations(config, mesh, name)]
    return [cause for cause in sending if mesh[cause.axis] > 1]


def _in_a_layer(
    config: Config, mesh: Mapping[str, int], shape: tuple[int, ...], rules: tuple[Rule, ...]
) -> list[Cause]:
    at_rest, runs = _at_rest(rules), _layer_runs(config, mesh)
    cuts = prod(mesh[axis] for axis in at_rest - {"data", "fsdp", "pipe"})
    size = _width(config) * prod(shape) / config.model.num_layers / cuts
    gradient = "gradient of a microbatch"
    sending = [Cause(gradient, "all-reduce", "context", runs, size)]
    if "fsdp" in at_rest:
        sending.append(Cause("weight, forward and backward", "all-gather", "fsdp", 2 * runs, size))
        sending.append(Cause(gradient, "reduce-scatter", "fsdp", runs, size))
    else:
        sending.append(Cause(gradient, "all-reduce", "fsdp", runs, size))
    if config.parallel.sequence_parallel and "tensor" not in at_rest:
        sending.append(Cause(f"{gradient}, whose tokens are spread", "all-reduce", "tensor", runs, size))
    return sending


def _outside(config: Config, mesh: Mapping[str, int], shape: tuple[int, ...], rules: tuple[Rule, ...]) -> list[Cause]:
    """Of a table, or the last norm."""
    at_rest, count = _at_rest(rules), microbatches(config)
    numbers = prod(shape) / prod(mesh[axis] for axis in at_rest - {"data", "fsdp"})
    gradient = Cause("gradient of a microbatch", "all-reduce", "context", count, FP32 * numbers)
    if "fsdp" not in at_rest:
        return [gradient, replace(gradient, axis="fsdp")]
    weight = Cause("table", "all-gather", "fsdp", count, _width(config) * numbers)
    return [gradient, weight, replace(gradient, op="reduce-scatter", axis="fsdp")]


def _once(config: Config, held: float, rules: tuple[Rule, ...]) -> list[Cause]:
    """At the end of a step."""
    gradient = Cause("gradient of the step", "all-reduce", "data", 1, FP32 * held)
    if "data" not in _at_rest(rules):
        return [gradient]
    weight = Cause("weight, for the next step", "all-gather", "data", 1, _width(config) * held)
    return [replace(gradient, op="reduce-scatter"), weight]


def _of_activations(config: Config, mesh: Mapping[str, int], name: str) -> Iterator[Cause]:
    """The residual stream [T, D] enters and leaves matrices and tables over `tensor` (2205.05198, figure 5)."""
    model, width, spread = config.model, _width(config), config.parallel.sequence_parallel
    tokens = config.train.micro_batch_size * config.data.seq_length / mesh["context"]
    stream = width * tokens * model.hidden_size
    residual = stream / (mesh["tensor"] if spread else 1)
    runs, count = _layer_runs(config, mesh), microbatches(config)
    gather, scatter = ("all-gather", "reduce-scatter") if spread else ("all-reduce", "all-reduce")
    if name in ("blocks.attention.qkv", "blocks.mlp.fc1"):
        if spread:
            yield Cause("input, and again for the weight's gradient", gather, "tensor", 2 * runs, stream)
        yield Cause("gradient of the input", scatter, "tensor", runs, stream)
    if name in ("blocks.attention.out", "blocks.mlp.fc2"):
        yield Cause("output", scatter, "tensor", runs, stream)
        if spread:
            yield Cause("gradient of the output", gather, "tensor", runs, stream)
    if name == "blocks.attention.qkv":
        keys = 2 * width * tokens * model.kv_heads * model.head_size / mesh["tensor"]
        hops, whole = (mesh["context"] - 1) * runs, keys * mesh["context"]
        if config.train.attention == "ring":
            yield Cause("keys and values, forward and backward", "collective-permute", "context", 2 * hops, keys)
            yield Cause("gradients of keys and values", "collective-permute", "context", hops, keys)
        else:
            yield Cause("keys and values, forward and backward", "all-gather", "context", 2 * runs, whole)
            yield Cause("gradients of keys and values", "reduce-scatter", "context", runs, whole)
    if name == "word_embedding":
        yield Cause("sum of the rows found", scatter, "tensor", count, stream)
        if spread:
            yield Cause("gradient of the rows", gather, "tensor", count, stream)
        yield Cause("sum of the rows found, and its gradient", "all-reduce", "pipe", 2 * count, residual)
    if name == ("word_embedding" if model.tied_head else "head"):
        if spread:
            yield Cause("input of the head", gather, "tensor", count, stream)
        yield Cause("gradient of the head's input", scatter, "tensor", count, stream)
        yield Cause("input of the head, and its gradient", "all-reduce", "pipe", 2 * count, residual)


def _at_rest(rules: tuple[Rule, ...]) -> set[str]:
    return {axis for rule in rules for axis in rule.at_rest}


def _layer_runs(config: Config, mesh: Mapping[str, int]) -> int:
    """Layers that a device runs forward in a step, and as often backward: (L / P v) (v M + P - 1)."""
    stages, chunks = mesh["pipe"], config.parallel.chunks
    return config.model.num_layers // (stages * chunks) * (chunks * microbatches(config) + stages - 1)


def _width(config: Config) -> int:
    """Bytes of a number in the forward and backward pass."""
    return FP32 if config.train.precision == "fp32" else 2
