"""What a step sends over which mesh axis, in closed form: what `planning.collectives` reads from a compiled program.

Counted as there: bytes of whole tensors, the result of an all-gather, the operand of a reduce-scatter, an all-reduce
once, as every device takes part in them. A pipeline's devices compute and send in the ticks in which it fills and
drains as well, if all of them run one program.

Letters: T tokens of a micro batch on a device, D embed; P stages, v chunks per stage, M microbatches, L layers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from megajax.config import Config
from megajax.costs.hardware import Gpu
from megajax.costs.stacks import head_matrices, lookups, lookups_again, stacks
from megajax.planning.cut import LAST, Cut, products
from megajax.planning.operations import WIDTH
from megajax.planning.roofline import StepTime, cuts_of, layers_per_stage, microbatch_count, stride_of, weights_in_step
from megajax.planning.trainers import Trainer


@dataclass(frozen=True)
class Sent:
    """Communication of one device over one mesh axis in a step."""

    bytes: float
    """Of whole tensors."""
    seconds: float
    """That nothing hides."""
    wire: Literal["NVLink", "network"]
    """The slowest that a group of devices needs."""


def traffic_by_axis(
    config: Config, mesh: Mapping[str, int], gpu: Gpu, trainer: Trainer, time: StepTime
) -> dict[str, Sent]:
    """Communication over every mesh axis that has more than one device.

    Args:
        config: with a known vocabulary.
        mesh: size of every axis.
        gpu: of which `link_domain` share NVLink.
        trainer: which program.
        time: of its step.
    """
    sizes = _sizes(config, mesh, cuts_of(config, mesh, gpu, trainer))
    return {
        axis: Sent(
            bytes=size,
            seconds=time.parts[axis],
            wire="NVLink" if mesh[axis] * stride_of(mesh, axis) <= gpu.link_domain else "network",
        )
        for axis, size in sizes.items()
        if mesh[axis] > 1
    }


def _sizes(config: Config, mesh: Mapping[str, int], cuts: Sequence[Cut]) -> dict[str, float]:
    cut, trainer, stages, chunks = cuts[-1], cuts[-1].trainer, mesh["pipe"], config.parallel.chunks
    count = microbatch_count(config, mesh)
    idle = (stages - 1) / chunks if trainer.scans_layers else 0  # of a microbatch, in each direction
    layers = [stack.layers for stack in stacks(config)[:-1]] + [layers_per_stage(config, mesh)]
    runs = [number * (count + idle) for number in layers]
    each = [_of_layer(cut) for cut in cuts]
    sent = {axis: sum(run * sizes[axis] for run, sizes in zip(runs, each, strict=True)) for axis in each[0]}
    outside = _outside(config, mesh, cuts)
    held = weights_in_step(config, mesh, trainer)
    over_data = trainer.gradient_bytes + (WIDTH[cut.numbers] if config.parallel.zero else 0)
    # At rest `data` cuts before `fsdp` does: pieces of gradients and weights change hands over both.
    swapped = (
        over_data * held / mesh["data"] if config.parallel.zero and mesh["fsdp"] > 1 and trainer.scans_layers else 0
    )
    sums = 4 + lookups_again(config.model, stages) * trainer.scans_layers
    vocabulary = sums * count if trainer.shares_vocabulary and stages > 1 else 0
    passed = 2 * (count * chunks + (stages - 1) * trainer.scans_layers)
    if trainer.scans_layers and (stages, chunks) == (2, 1):
        passed -= 1  # a single tick of cool-down is no loop, and XLA sees that nobody needs the gradient it passes on
    return {
        **{axis: sent[axis] + outside[axis] + swapped * (axis == "fsdp") for axis in sent},
        "pipe": (passed + vocabulary) * cut.residual,
        "data": over_data * held + swapped,
    }


def _of_layer(cut: Cut) -> dict[str, float]:
    """Of one layer and microbatch, forward and backward."""
    model, width, scans = cut.model, WIDTH[cut.numbers], cut.trainer.scans_layers
    weights = width * cut.held
    keys = 2 * width * cut.samples * cut.sequence * cut.kv_heads * model.head_size
    # Gathered forward and backward and their gradients scattered, or round a ring: forward, backward, gradients.
    travelling = 3 * keys * ((cut.context - 1) / cut.context if cut.kernel == "ring" or not scans else 1)
    sent = {
        "tensor": _borders(cut),
        "context": travelling + weights / cut.fsdp * scans,
        "fsdp": 3 * weights,
        "expert": width * cut.weights.replicated_over_expert(cut.tensor, cut.whole_heads) / cut.fsdp * scans,
    }
    if model.positions == "relative" and scans:
        # The bias [N, S, S] has no samples: its gradient is summed over all that have some, before it meets the table.
        sent["fsdp"] += 4 * cut.heads * cut.sequence**2
    if model.experts:
        # Inputs gathered twice and their cotangents once, outputs scattered and gradients too; so are the numbers of
        # the chosen experts, and their shares, of which alone there is a gradient.
        chosen = 5 * 4 * cut.tokens * model.experts_per_token
        sent["tensor"] += (5 * cut.stream + chosen) if cut.sequence_parallel else 2 * cut.stream
        sent["tensor"] += width * model.hidden_size * model.experts * scans
        sent["expert"] += cut.expert * (5 * cut.stream + chosen)
    return sent


def _borders(cut: Cut) -> float:
    """Gathers and scatters of the residual stream around a layer's products; all-reduces without sequence parallelism.

    What enters is gathered forward and, for the gradient of the weights, backward, where its own gradient is scattered;
    what leaves is scattered forward and its gradient gathered. Around whole heads no activation is summed. What the
    encoder made is gathered once for all layers (see `_outside`).
    """
    sent = 0.0
    for product in products(cut):
        stream = cut.stream * product.rows / cut.tokens
        if product.whole:  # the input is gathered, or the output's gradient; and the gradient of the weights summed
            ways = int(cut.sequence_parallel)
            sent += WIDTH[cut.numbers] * product.k * product.n / cut.fsdp * cut.sequence_parallel
        elif product.enters:
            ways = (1 if product.encoded else 3) if cut.sequence_parallel else 1
        else:
            again = cut.remat != "none" and product.makes not in (*cut.kept, LAST)
            ways = (2 if cut.sequence_parallel else 1) + again
        sent += ways * stream
    return sent


def _outside(config: Config, mesh: Mapping[str, int], cuts: Sequence[Cut]) -> dict[str, float]:
    """Of embedding and head, in a step.

    On a single stage a tied table is gathered once for all its uses, and what is only summed, and added to the sums of
    the step as it is, is summed once a step.
    """
    cut, model, stages = cuts[-1], config.model, mesh["pipe"]
    width, scans, count = WIDTH[cut.numbers], cut.trainer.scans_layers, microbatch_count(config, mesh)
    table = (
        model.padded_vocab_size * model.hidden_size / (cut.tensor * (stages if cut.trainer.shares_vocabulary else 1))
    )
    uses = lookups(model) + 1
    gathers = 2 - model.tied_head if stages == 1 and scans else uses
    places = model.position_rows if model.positions == "learned" else 0
    square = model.hidden_size**2
    positions = places * model.hidden_size / (1 if places % cut.tensor else cut.tensor)
    sums = 4 * (uses * table + positions) / mesh["fsdp"] * (1 if stages == 1 else count) * scans
    again = lookups_again(model, stages) * scans
    tables = (width * (gathers + again) + 4 * uses) * table + (width * (1 + again) + 4) * positions
    matrices = head_matrices(model)
    transform = width * square * (matrices > 0) * (1 if stages == 1 else count) / mesh["fsdp"]
    streams = sum(cut.stream for cut in cuts) + cut.stream  # looked up, and the head's
    memory = sum(cut.stream for cut in cuts[:-1])
    return {
        "tensor": count * (((2 * streams + memory) if cut.sequence_parallel else streams) + again * cut.stream)
        + transform * cut.sequence_parallel * scans,
        "context": sums,
        "fsdp": count * (tables + 2 * width * matrices * square),
        "expert": sums,
    }
