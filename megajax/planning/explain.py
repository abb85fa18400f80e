"""Collectives of a step that a single parameter causes.

Bytes are those of whole tensors, as in `planning.collectives`. Counts are those of one device; a pipeline's devices
also send in the ticks in which it fills and drains.

Letters: T tokens of a micro batch on a device, D embed; P stages, v chunks per stage, M microbatches, L layers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from math import prod

from megajax.config import Config
from megajax.costs.device import Device, lookups, lookups_again
from megajax.costs.weights import require_one_kind
from megajax.models.model import Stack
from megajax.parallel.rules import Rule
from megajax.planning.cut import LAST, branch_ends, kept_by

FP32 = 4


@dataclass(frozen=True)
class Cause:
    """A collective that a parameter causes."""

    what: str
    op: str
    axis: str
    """Mesh axis that the collective crosses."""
    count: int
    """Number of executions in a step."""
    bytes: float
    """Bytes of one execution."""


def causes(
    config: Config, mesh: Mapping[str, int], name: str, shape: tuple[int, ...], rules: tuple[Rule, ...]
) -> list[Cause]:
    """List the collectives of a step that a parameter causes.

    Args:
        config: configuration with a known vocabulary, whose layout is that of the mesh.
        mesh: size of every axis.
        name: name of the parameter.
        shape: shape of the whole parameter.
        rules: sharding rules of its dimensions.

    Raises:
        InputError: the parameter belongs to layers that differ in what they hold.
    """
    device, layered = Device(config, mesh), "layers" in (rule.logical for rule in rules)
    of_weights = _in_a_layer(device, name, shape, rules) if layered else _outside(device, name, shape, rules)
    held = prod(shape) / prod(mesh[axis] for axis in _at_rest(rules) - {"data"})  # during a step
    sending = [*of_weights, *_once(device, held, rules), *_of_activations(device, name)]
    return [cause for cause in sending if mesh[cause.axis] > 1 and cause.count]


def _in_a_layer(device: Device, name: str, shape: tuple[int, ...], rules: tuple[Rule, ...]) -> list[Cause]:
    require_one_kind(device.config.model)
    at_rest, stack = _at_rest(rules), _stack(device, name)
    runs = _layer_runs(device, stack)
    cuts = prod(device.mesh[axis] for axis in at_rest - {"data", "fsdp", "pipe"})
    size = device.width * prod(shape) / stack.layers / cuts
    gradient = Cause("gradient of a microbatch", "all-reduce", "context", runs, size)
    if "fsdp" in at_rest:
        sending = [
            Cause("weight, forward and backward", "all-gather", "fsdp", 2 * runs, size),
            replace(gradient, op="reduce-scatter", axis="fsdp"),
        ]
        gradient = replace(gradient, bytes=size / device.mesh["fsdp"])
    else:
        sending = [replace(gradient, axis="fsdp")]
    sending.append(gradient)
    if "expert" not in at_rest:
        sending.append(replace(gradient, axis="expert"))
    router = name == "blocks.mlp.router"
    if "tensor" not in at_rest and (device.config.parallel.sequence_parallel or router):
        sending.append(replace(gradient, what=f"{gradient.what}, whose tokens are spread", axis="tensor"))
    return sending


def _outside(device: Device, name: str, shape: tuple[int, ...], rules: tuple[Rule, ...]) -> list[Cause]:
    """List the collectives that a table, a matrix of the head or the last norm causes."""
    at_rest, count, single = _at_rest(rules), device.microbatches, device.mesh["pipe"] == 1
    is_table = {"vocab", "positions"} & {rule.logical for rule in rules}
    numbers = prod(shape) / prod(device.mesh[axis] for axis in at_rest - {"data", "fsdp"})
    uses = 1
    if name == "word_embedding":
        uses = lookups(device.config.model) + device.config.model.tied_head
    size = (FP32 if is_table or "fsdp" not in at_rest else device.width) * numbers
    what = "gradient of a microbatch" if device.mesh["pipe"] > 1 else "gradient, summed over the microbatches"
    scattered = size / (device.mesh["fsdp"] if "fsdp" in at_rest else 1)
    summed = Cause(what, "all-reduce", "context", uses * (1 if single else count), scattered)
    sending = [summed, replace(summed, axis="expert")]
    if name == "transform" and device.config.parallel.sequence_parallel:
        sending.append(replace(summed, axis="tensor"))
    gradient = Cause("gradient of a microbatch", "all-reduce", "fsdp", uses * count, size)
    if name in ("encoder_bias", "decoder_bias"):  # [R, N], but the layers' biases [N, S, S] are summed
        stack = _stack(device, name)
        biases = FP32 * numbers / shape[0] * stack.sequence**2
        gradient = Cause("gradient in a layer", "all-reduce", "fsdp", _layer_runs(device, stack), biases)
    if "fsdp" not in at_rest:
        return [*sending, gradient]
    again = lookups_again(device.config.model, device.mesh["pipe"]) * (name == "word_embedding")
    gathers = count * (1 if single else uses + again)
    weight = Cause("table" if is_table else "matrix", "all-gather", "fsdp", gathers, device.width * numbers)
    return [*sending, weight, replace(gradient, op="reduce-scatter")]


def _once(device: Device, held: float, rules: tuple[Rule, ...]) -> list[Cause]:
    """List the collectives that a parameter causes at the end of a step."""
    gradient = Cause("gradient of the step", "all-reduce", "data", 1, FP32 * held)
    if "data" not in _at_rest(rules):
        return [gradient]
    weight = Cause("weight, for the next step", "all-gather", "data", 1, device.width * held)
    sending = [replace(gradient, op="reduce-scatter"), weight]
    if device.mesh["fsdp"] > 1:  # at rest `data` cuts before `fsdp`: devices exchange pieces over both
        piece = (FP32 + device.width) * held / device.mesh["data"]
        sending.append(Cause("gradient and weight, put in order", "collective-permute", "data", 1, piece))
    return sending


def _of_activations(device: Device, name: str) -> Iterator[Cause]:
    """Yield the collectives of the residual stream [T, D], which enters and leaves matrices and tables over `tensor`.

    The source is 2205.05198, figure 5.
    """
    model, spread = device.config.model, device.config.parallel.sequence_parallel
    stack, count = _stack(device, name), device.microbatches
    stream = device.stream(stack.sequence)
    residual = stream / device.stream_ways
    gather, scatter = ("all-gather", "reduce-scatter") if spread else ("all-reduce", "all-reduce")
    _, is_layer, matrix = name.partition("blocks.")
    if is_layer:
        yield from _in_and_out(device, stack, matrix)
    if matrix == "attention.qkv":
        yield from _keys(device, stack)
    if name == "word_embedding":
        for each in device.stacks:
            looked_up = device.stream(each.sequence)
            yield Cause("sum of the rows found", scatter, "tensor", count, looked_up)
            if spread:
                yield Cause("gradient of the rows", gather, "tensor", count, looked_up)
        again = lookups_again(model, device.mesh["pipe"]) * count
        yield Cause("sum of the rows found, for the gradient of the norm behind it", scatter, "tensor", again, stream)
        sums = 2 * count + again
        yield Cause("sum of the rows found, and its gradient", "all-reduce", "pipe", sums, residual)
    if name == ("word_embedding" if model.tied_head else "head"):
        if spread:
            yield Cause("input of the head", gather, "tensor", count, stream)
        yield Cause("gradient of the head's input", scatter, "tensor", count, stream)
        yield Cause("input of the head, and its gradient", "all-reduce", "pipe", 2 * count, residual)
    if name == "encoder_norm.scale" and spread:
        encoded = device.stream(device.stacks[0].sequence)
        yield Cause("output of the encoder, for all layers of the decoder", gather, "tensor", count, encoded)


def _in_and_out(device: Device, stack: Stack, matrix: str) -> Iterator[Cause]:
    """Yield the collectives of the input and of the output of a layer's matrix."""
    spread, runs = device.config.parallel.sequence_parallel, _layer_runs(device, stack)
    stream = device.stream(stack.sequence)
    gather, scatter = ("all-gather", "reduce-scatter") if spread else ("all-reduce", "all-reduce")
    whole = device.config.parallel.whole_heads and matrix.split(".", maxsplit=1)[0] in ("attention", "cross")
    if whole:
        if spread and matrix in ("attention.qkv", "attention.out"):
            what = "input" if matrix == "attention.qkv" else "gradient of the output"
            yield Cause(what, gather, "tensor", runs, stream)
        return
    if matrix == "cross.kv":
        encoded = device.stream(stack.memory)
        yield Cause("gradient of the encoder's output", scatter, "tensor", runs, encoded)
    mixture = device.config.model.experts > 0 and matrix in ("mlp.fc1", "mlp.fc2")
    gathered = stream * device.mesh["expert"]
    if matrix in ("attention.qkv", "cross.q", "mlp.fc1", "mlp.shared.fc1"):
        if spread:
            yield Cause("input, and again for the weight's gradient", gather, "tensor", 2 * runs, stream)
        yield Cause("gradient of the input", scatter, "tensor", runs, stream)
        if mixture:
            yield Cause("input of the experts, forward and backward", "all-gather", "expert", 2 * runs, gathered)
            yield Cause("gradient of the input", "reduce-scatter", "expert", runs, gathered)
    if matrix in ("attention.out", "cross.out", "mlp.fc2", "mlp.shared.fc2"):
        again = runs * _repeats_output(device, matrix)
        yield Cause("output", scatter, "tensor", runs, stream)
        yield Cause("output, computed again for the backward pass", scatter, "tensor", again, stream)
        if spread:
            yield Cause("gradient of the output", gather, "tensor", runs, stream)
        if mixture:
            yield Cause("output of the experts", "reduce-scatter", "expert", runs + again, gathered)
            yield Cause("gradient of the output", "all-gather", "expert", runs, gathered)


def _repeats_output(device: Device, matrix: str) -> bool:
    """Tell whether the backward pass computes the output of a layer's last matrix again, as it needs it."""
    model, (first, last) = device.config.model, branch_ends(device.config.model)
    if model.experts and matrix == "mlp.fc2" and not model.branch_norm:
        return False  # the experts are computed again in any case, but for their outputs
    makes = {"attention.out": first, "cross.out": "attention_residual"}.get(matrix, last)
    return makes not in (*kept_by(device.config.train.remat), LAST)


def _keys(device: Device, stack: Stack) -> Iterator[Cause]:
    """Yield the collectives of keys and values from other devices along `context`."""
    runs = _layer_runs(device, stack)
    keys = 2 * device.width * device.tokens(stack.sequence) * device.kv_heads * device.config.model.head_size
    hops, whole = (device.mesh["context"] - 1) * runs, keys * device.mesh["context"]
    if device.config.train.attention == "ring":
        yield Cause("keys and values, forward and backward", "collective-permute", "context", 2 * hops, keys)
        yield Cause("gradients of keys and values", "collective-permute", "context", hops, keys)
    else:
        yield Cause("keys and values, forward and backward", "all-gather", "context", 2 * runs, whole)
        yield Cause("gradients of keys and values", "reduce-scatter", "context", runs, whole)


def _stack(device: Device, name: str) -> Stack:
    """Return the stack of a parameter; parameters outside of stacks count as the last one's."""
    return device.stacks[0 if name.startswith("encoder_") else -1]


def _at_rest(rules: tuple[Rule, ...]) -> set[str]:
    return {axis for rule in rules for axis in rule.at_rest}


def _layer_runs(device: Device, stack: Stack) -> int:
    """Return the number of layers that a device runs forward in a step, which equals that of backward runs.

    It is (L / P v) (v M + P - 1).
    """
    stages, chunks = device.mesh["pipe"], device.config.parallel.chunks
    return stack.layers // (stages * chunks) * (chunks * device.microbatches + stages - 1)
