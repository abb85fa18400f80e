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
from megajax.costs.stacks import Stack, lookups, lookups_again, stacks
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
    of_weights = (
        _in_a_layer(config, mesh, name, shape, rules) if layered else _outside(config, mesh, name, shape, rules)
    )
    held = prod(shape) / prod(mesh[axis] for axis in _at_rest(rules) - {"data"})  # during a step
    sending = [*of_weights, *_once(config, mesh, held, rules), *_of_activations(config, mesh, name)]
    return [cause for cause in sending if mesh[cause.axis] > 1 and cause.count]


def _in_a_layer(
    config: Config, mesh: Mapping[str, int], name: str, shape: tuple[int, ...], rules: tuple[Rule, ...]
) -> list[Cause]:
    at_rest, stack = _at_rest(rules), _stack(config, name)
    runs = _layer_runs(config, mesh, stack)
    cuts = prod(mesh[axis] for axis in at_rest - {"data", "fsdp", "pipe"})
    size = _width(config) * prod(shape) / stack.layers / cuts
    gradient = Cause("gradient of a microbatch", "all-reduce", "context", runs, size)
    if "fsdp" in at_rest:
        sending = [
            Cause("weight, forward and backward", "all-gather", "fsdp", 2 * runs, size),
            replace(gradient, op="reduce-scatter", axis="fsdp"),
        ]
        gradient = replace(gradient, bytes=size / mesh["fsdp"])
    else:
        sending = [replace(gradient, axis="fsdp")]
    sending.append(gradient)
    if "expert" not in at_rest:
        sending.append(replace(gradient, axis="expert"))
    router = name == "blocks.mlp.router"
    if "tensor" not in at_rest and (config.parallel.sequence_parallel or router):
        sending.append(replace(gradient, what=f"{gradient.what}, whose tokens are spread", axis="tensor"))
    return sending


def _outside(
    config: Config, mesh: Mapping[str, int], name: str, shape: tuple[int, ...], rules: tuple[Rule, ...]
) -> list[Cause]:
    """Of a table, a matrix of the head, or the last norm."""
    at_rest, count, single = _at_rest(rules), microbatches(config), mesh["pipe"] == 1
    is_table = {"vocab", "positions"} & {rule.logical for rule in rules}
    numbers = prod(shape) / prod(mesh[axis] for axis in at_rest - {"data", "fsdp"})
    uses = 1
    if name == "word_embedding":
        uses = lookups(config.model) + config.model.tied_head
    size = (FP32 if is_table or "fsdp" not in at_rest else _width(config)) * numbers
    what = "gradient of a microbatch" if mesh["pipe"] > 1 else "gradient, summed over the microbatches"
    scattered = size / (mesh["fsdp"] if "fsdp" in at_rest else 1)
    summed = Cause(what, "all-reduce", "context", uses * (1 if single else count), scattered)
    sending = [summed, replace(summed, axis="expert")]
    if name == "transform" and config.parallel.sequence_parallel:
        sending.append(replace(summed, axis="tensor"))
    gradient = Cause("gradient of a microbatch", "all-reduce", "fsdp", uses * count, size)
    if name in ("encoder_bias", "decoder_bias"):  # [R, N]: what is summed are the biases [N, S, S] of the layers
        stack = _stack(config, name)
        biases = FP32 * numbers / shape[0] * stack.sequence**2
        gradient = Cause("gradient in a layer", "all-reduce", "fsdp", _layer_runs(config, mesh, stack), biases)
    if "fsdp" not in at_rest:
        return [*sending, gradient]
    again = lookups_again(config.model, mesh["pipe"]) * (name == "word_embedding")
    gathers = count * (1 if single else uses + again)
    weight = Cause("table" if is_table else "matrix", "all-gather", "fsdp", gathers, _width(config) * numbers)
    return [*sending, weight, replace(gradient, op="reduce-scatter")]


def _once(config: Config, mesh: Mapping[str, int], held: float, rules: tuple[Rule, ...]) -> list[Cause]:
    """At the end of a step."""
    gradient = Cause("gradient of the step", "all-reduce", "data", 1, FP32 * held)
    if "data" not in _at_rest(rules):
        return [gradient]
    weight = Cause("weight, for the next step", "all-gather", "data", 1, _width(config) * held)
    sending = [replace(gradient, op="reduce-scatter"), weight]
    if mesh["fsdp"] > 1:  # at rest `data` cuts before `fsdp` does: pieces change hands over both
        piece = (FP32 + _width(config)) * held / mesh["data"]
        sending.append(Cause("gradient and weight, put in order", "collective-permute", "data", 1, piece))
    return sending


def _of_activations(config: Config, mesh: Mapping[str, int], name: str) -> Iterator[Cause]:
    """The residual stream [T, D] enters and leaves matrices and tables over `tensor` (2205.05198, figure 5)."""
    model, spread = config.model, config.parallel.sequence_parallel
    stack, count = _stack(config, name), microbatches(config)
    stream = _stream(config, mesh, stack.sequence)
    residual = stream / (mesh["tensor"] if spread else 1)
    gather, scatter = ("all-gather", "reduce-scatter") if spread else ("all-reduce", "all-reduce")
    _, is_layer, matrix = name.partition("blocks.")
    if is_layer:
        yield from _in_and_out(config, mesh, stack, matrix)
    if matrix == "attention.qkv":
        yield from _keys(config, mesh, stack)
    if name == "word_embedding":
        for each in stacks(config):
            looked_up = _stream(config, mesh, each.sequence)
            yield Cause("sum of the rows found", scatter, "tensor", count, looked_up)
            if spread:
                yield Cause("gradient of the rows", gather, "tensor", count, looked_up)
        again = lookups_again(model, mesh["pipe"]) * count
        yield Cause("sum of the rows found, for the gradient of the norm behind it", scatter, "tensor", again, stream)
        sums = 2 * count + again
        yield Cause("sum of the rows found, and its gradient", "all-reduce", "pipe", sums, residual)
    if name == ("word_embedding" if model.tied_head else "head"):
        if spread:
            yield Cause("input of the head", gather, "tensor", count, stream)
        yield Cause("gradient of the head's input", scatter, "tensor", count, stream)
        yield Cause("input of the head, and its gradient", "all-reduce", "pipe", 2 * count, residual)
    if name == "encoder_norm.scale" and spread:
        encoded = _stream(config, mesh, stacks(config)[0].sequence)
        yield Cause("output of the encoder, for all layers of the decoder", gather, "tensor", count, encoded)


def _in_and_out(config: Config, mesh: Mapping[str, int], stack: Stack, matrix: str) -> Iterator[Cause]:
    """What a matrix of a layer starts from, and what it makes."""
    spread, runs = config.parallel.sequence_parallel, _layer_runs(config, mesh, stack)
    stream = _stream(config, mesh, stack.sequence)
    gather, scatter = ("all-gather", "reduce-scatter") if spread else ("all-reduce", "all-reduce")
    whole = config.parallel.whole_heads and matrix.split(".", maxsplit=1)[0] in ("attention", "cross")
    if whole:
        if spread and matrix in ("attention.qkv", "attention.out"):
            what = "input" if matrix == "attention.qkv" else "gradient of the output"
            yield Cause(what, gather, "tensor", runs, stream)
        return
    if matrix == "cross.kv":
        encoded = _stream(config, mesh, stack.memory)
        yield Cause("gradient of the encoder's output", scatter, "tensor", runs, encoded)
    mixture = config.model.experts > 0 and matrix in ("mlp.fc1", "mlp.fc2")
    gathered = _stream(config, mesh, stack.sequence) * mesh["expert"]
    if matrix in ("attention.qkv", "cross.q", "mlp.fc1", "mlp.shared.fc1"):
        if spread:
            yield Cause("input, and again for the weight's gradient", gather, "tensor", 2 * runs, stream)
        yield Cause("gradient of the input", scatter, "tensor", runs, stream)
        if mixture:
            yield Cause("input of the experts, forward and backward", "all-gather", "expert", 2 * runs, gathered)
            yield Cause("gradient of the input", "reduce-scatter", "expert", runs, gathered)
    if matrix in ("attention.out", "cross.out", "mlp.fc2", "mlp.shared.fc2"):
        yield Cause("output", scatter, "tensor", runs, stream)
        if spread:
            yield Cause("gradient of the output", gather, "tensor", runs, stream)
        if mixture:
            yield Cause("output of the experts", "reduce-scatter", "expert", runs, gathered)
            yield Cause("gradient of the output", "all-gather", "expert", runs, gathered)


def _keys(config: Config, mesh: Mapping[str, int], stack: Stack) -> Iterator[Cause]:
    """Keys and values of the tokens of other devices along `context`."""
    model, runs = config.model, _layer_runs(config, mesh, stack)
    tokens = config.train.micro_batch_size * stack.sequence / mesh["context"]
    cuts = 1 if config.parallel.whole_heads else mesh["tensor"]
    keys = 2 * _width(config) * tokens * model.kv_heads * model.head_size / cuts
    hops, whole = (mesh["context"] - 1) * runs, keys * mesh["context"]
    if config.train.attention == "ring":
        yield Cause("keys and values, forward and backward", "collective-permute", "context", 2 * hops, keys)
        yield Cause("gradients of keys and values", "collective-permute", "context", hops, keys)
    else:
        yield Cause("keys and values, forward and backward", "all-gather", "context", 2 * runs, whole)
        yield Cause("gradients of keys and values", "reduce-scatter", "context", runs, whole)


def _stream(config: Config, mesh: Mapping[str, int], sequence: int) -> float:
    """Bytes of the residual stream of a microbatch of samples of so many tokens."""
    tokens = config.train.micro_batch_size * sequence / mesh["context"]
    return _width(config) * tokens * config.model.hidden_size


def _stack(config: Config, name: str) -> Stack:
    """To which a parameter belongs; those outside count to the last."""
    return stacks(config)[0 if name.startswith("encoder_") else -1]


def _at_rest(rules: tuple[Rule, ...]) -> set[str]:
    return {axis for rule in rules for axis in rule.at_rest}


def _layer_runs(config: Config, mesh: Mapping[str, int], stack: Stack) -> int:
    """Layers that a device runs forward in a step, and as often backward: (L / P v) (v M + P - 1)."""
    stages, chunks = mesh["pipe"], config.parallel.chunks
    return stack.layers // (stages * chunks) * (chunks * microbatches(config) + stages - 1)


def _width(config: Config) -> int:
    """Bytes of a number in the forward and backward pass."""
    return FP32 if config.train.precision == "fp32" else 2
