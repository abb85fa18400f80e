"""Bytes that a step sends over every mesh axis in every loop, in closed form.

`planning.collectives` reads the same bytes from a compiled program.

Both count the bytes of whole tensors in which every device takes part: the result of an all-gather, the operand of a
reduce-scatter, and an all-reduce once. If all devices of a pipeline run one program, they also compute and send in the
ticks in which it fills and drains.

Letters: T tokens of a micro batch on a device, D embed; P stages, v chunks per stage, M microbatches, L layers.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from megajax.config import Config
from megajax.costs.device import Device, head_matrices, lookups, lookups_again
from megajax.costs.hardware import Gpu
from megajax.models.families import model_class
from megajax.planning.collectives import PLACES, Place
from megajax.planning.cut import Cut, Trainer, products
from megajax.planning.operations import WIDTH
from megajax.planning.roofline import StepTime, cuts_of, weights_in_step


@dataclass(frozen=True)
class Sent:
    """The communication of one device over one mesh axis in a step."""

    places: Mapping[Place, float]
    """Bytes of whole tensors by the loop that sends them."""
    seconds: float
    """Seconds of communication that no work hides."""
    wire: Literal["NVLink", "network"]
    """Slowest link that a group of devices needs."""

    @property
    def bytes(self) -> float:
        """Return the bytes of the whole tensors in all loops."""
        return sum(self.places.values())


Sizes = Mapping[tuple[str, Place], float]
"""Bytes over every mesh axis in every loop; missing pairs send nothing."""


def traffic_by_axis(
    config: Config, mesh: Mapping[str, int], gpu: Gpu, trainer: Trainer, time: StepTime
) -> dict[str, Sent]:
    """Return the communication over every mesh axis that has more than one device.

    Args:
        config: configuration with a known vocabulary.
        mesh: size of every axis.
        gpu: type of GPU, of which `link_domain` share NVLink.
        trainer: training program.
        time: predicted time of a step.
    """
    device = Device(config, mesh)
    sizes = _sizes(device, cuts_of(config, mesh, gpu, trainer))
    return {
        axis: Sent(
            places={place: sizes.get((axis, place), 0.0) for place in PLACES},
            seconds=time.parts[axis],
            wire="NVLink" if mesh[axis] * device.stride(axis) <= gpu.link_domain else "network",
        )
        for axis in ("tensor", "context", "fsdp", "expert", "pipe", "data")
        if mesh[axis] > 1
    }


def _sizes(device: Device, cuts: Sequence[Cut]) -> Sizes:
    cut, trainer, parallel, mesh = cuts[-1], cuts[-1].trainer, device.config.parallel, device.mesh
    stages, chunks, count = mesh["pipe"], parallel.chunks, device.microbatches
    idle = (stages - 1) / chunks if trainer.scans_layers else 0  # idle ticks in microbatches, in each direction
    layers = [stack.layers for stack in device.stacks[:-1]] + [device.layers]
    held = weights_in_step(device, trainer)
    over_data = trainer.gradient_bytes + (WIDTH[cut.numbers] if parallel.zero else 0)
    # At rest `data` cuts before `fsdp`: devices exchange pieces of gradients and weights over both.
    swaps = parallel.zero and mesh["fsdp"] > 1 and trainer.scans_layers
    swapped = over_data * held / mesh["data"] if swaps else 0
    sums = 4 + lookups_again(device.config.model, stages) * trainer.scans_layers
    vocabulary = sums * count if trainer.shares_vocabulary and stages > 1 else 0
    passed = 2 * (count * chunks + (stages - 1) * trainer.scans_layers)
    if trainer.scans_layers and (stages, chunks) == (2, 1):
        passed -= 1  # a single tick of cool-down is not a loop, and XLA removes its unused gradient
    once: Sizes = {
        ("pipe", "each microbatch"): (passed + vocabulary) * cut.residual,
        ("data", "each step"): over_data * held + swapped,
        ("fsdp", "each step"): swapped,
    }
    runs = ((number * (count + idle), _of_layer(each)) for number, each in zip(layers, cuts, strict=True))
    return _total((*runs, (count, _of_microbatch(device, cuts)), (1, once), _of_sums(device, cut)))


def _total(parts: Iterable[tuple[float, Sizes]]) -> Sizes:
    """Return the sum of sizes, each multiplied by its number of times."""
    total: defaultdict[tuple[str, Place], float] = defaultdict(float)
    for times, sizes in parts:
        for where, size in sizes.items():
            total[where] += times * size
    return total


def _of_layer(cut: Cut) -> Sizes:
    """Return the bytes that one layer sends for one microbatch."""
    model, width, scans = cut.model, WIDTH[cut.numbers], cut.trainer.scans_layers
    weights = width * cut.held
    keys = 2 * width * cut.samples * cut.sequence * cut.kv_heads * model.head_size
    # Keys and values are gathered forward and backward and their gradients scattered, or all go round a ring.
    travelling = keys * ((cut.context - 1) / cut.context if cut.kernel == "ring" or not scans else 1)
    shared = width * cut.weights.replicated_over_expert(cut.tensor, cut.whole_heads)
    entering, returning = _borders(cut)
    forward = {"tensor": entering, "context": travelling, "fsdp": weights, "expert": 0.0}
    backward = {
        "tensor": returning,
        "context": 2 * travelling + weights / cut.fsdp * scans,
        "fsdp": 2 * weights,
        "expert": shared / cut.fsdp * scans,
    }
    if model.positions == "relative" and scans:
        # The bias [N, S, S] has no samples: its gradient is summed over all axes that cut samples, before the table's.
        backward["fsdp"] += 4 * cut.heads * cut.sequence**2
    if model.experts:
        # Inputs are gathered twice and their cotangents once; outputs and gradients are scattered. The numbers of the
        # chosen experts are treated so, too, and their shares, of which alone there is a gradient.
        chosen = 4 * cut.tokens * model.experts_per_token
        again = cut.stream * cut.repeats_experts  # outputs are scattered once more
        both_ways = (
            (forward, 2 * (cut.stream + chosen), cut.stream),
            (backward, 3 * (cut.stream + chosen) + again, cut.stream + again),
        )
        for direction, gathered, summed in both_ways:
            direction["tensor"] += gathered if cut.sequence_parallel else summed
            direction["expert"] += cut.expert * gathered
        backward["tensor"] += width * model.hidden_size * model.experts * scans
    return {(axis, "layers forward"): size for axis, size in forward.items()} | {
        (axis, "layers backward"): size for axis, size in backward.items()
    }


def _borders(cut: Cut) -> tuple[float, float]:
    """Return the bytes of gathers and scatters of the residual stream around a layer's products.

    Without sequence parallelism these are all-reduces.

    The input of a product is gathered in the forward pass and, for the gradient of the weights, in the backward pass,
    where its own gradient is scattered; an output is scattered forward and its gradient is gathered. Around whole heads
    no activation is summed. The encoder's output is gathered once for all layers (see `_of_microbatch`).

    Returns:
        The bytes of the forward and of the backward pass.
    """
    forward = backward = 0.0
    spread = int(cut.sequence_parallel)
    for product in products(cut):
        stream = cut.stream * product.rows / cut.tokens
        if product.whole:  # input or output's gradient is gathered, weights' gradient summed
            forward += spread * product.enters * stream
            backward += spread * (not product.enters) * stream
            backward += spread * WIDTH[cut.numbers] * product.k * product.n / cut.fsdp
        elif product.enters:
            gathers = spread * (not product.encoded)
            forward += gathers * stream
            backward += (gathers + 1) * stream
        else:
            forward += stream
            backward += (spread + cut.repeats(product.makes)) * stream
    return forward, backward


def _of_microbatch(device: Device, cuts: Sequence[Cut]) -> Sizes:
    """Return the bytes that embedding and head send for one microbatch.

    On a single stage a tied table is gathered once for all its uses.
    """
    cut, model, stages = cuts[-1], device.config.model, device.mesh["pipe"]
    width, scans = WIDTH[cut.numbers], cut.trainer.scans_layers
    table, positions = _tables(device, cut)
    uses = lookups(model) + 1
    gathers = 2 - model.tied_head if stages == 1 and scans else uses
    again = lookups_again(model, stages) * scans
    tables = (width * (gathers + again) + 4 * uses) * table + (width * (1 + again) + 4) * positions
    streams = sum(cut.stream for cut in cuts) + cut.stream  # lookups, and the head's input
    memory = sum(cut.stream for cut in cuts[:-1])
    return {
        ("tensor", "each microbatch"): ((2 * streams + memory) if cut.sequence_parallel else streams)
        + again * cut.stream,
        ("fsdp", "each microbatch"): tables + 2 * width * head_matrices(model) * model.hidden_size**2,
    }


def _of_sums(device: Device, cut: Cut) -> tuple[float, Sizes]:
    """Return how often a step sums those gradients of embedding and head that are not scattered, and their bytes.

    On a single stage these gradients are added up over the microbatches and summed over devices once a step.
    """
    model, mesh, single, scans = device.config.model, device.mesh, device.mesh["pipe"] == 1, cut.trainer.scans_layers
    table, positions = _tables(device, cut)
    sums = 4 * ((lookups(model) + 1) * table + positions) / mesh["fsdp"] * scans
    transform = WIDTH[cut.numbers] * model.hidden_size**2 * model_class(model).head_transform / mesh["fsdp"]
    place: Place = "each step" if single else "each microbatch"
    sizes: Sizes = {
        ("tensor", place): transform * cut.sequence_parallel * scans,
        ("context", place): sums,
        ("expert", place): sums,
    }
    return 1 if single else device.microbatches, sizes


def _tables(device: Device, cut: Cut) -> tuple[float, float]:
    """Return the numbers of elements of the word and of the position embedding with which a device computes."""
    model = device.config.model
    words = model.padded_vocab_size / (cut.tensor * (device.mesh["pipe"] if cut.trainer.shares_vocabulary else 1))
    places = model.position_rows if model.positions == "learned" else 0
    return words * model.hidden_size, places / (1 if places % cut.tensor else cut.tensor) * model.hidden_size
