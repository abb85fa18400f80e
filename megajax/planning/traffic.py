"""What a step sends over which mesh axis, in closed form: what `planning.collectives` reads from a compiled program.

Counted as there: bytes of whole tensors, the result of an all-gather, the operand of a reduce-scatter, an all-reduce
once, as every device takes part in them. A pipeline's devices compute and send in the ticks in which it fills and
drains as well, if all of them run one program.

Letters: T tokens of a micro batch on a device, D embed; P stages, v chunks per stage, M microbatches, L layers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from megajax.config import Config
from megajax.config.train import ACTIVATION_NAMES
from megajax.planning.hardware import Gpu
from megajax.planning.layer_time import Cut, layer_parameters, products
from megajax.planning.operations import WIDTH
from megajax.planning.roofline import StepTime, layers_per_stage, microbatch_count, stride_of, weights_in_step
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
    sizes = _sizes(config, mesh, Cut.of(config, mesh, gpu, trainer))
    return {
        axis: Sent(
            bytes=size,
            seconds=time.parts[axis],
            wire="NVLink" if mesh[axis] * stride_of(mesh, axis) <= gpu.link_domain else "network",
        )
        for axis, size in sizes.items()
        if mesh[axis] > 1
    }


def _sizes(config: Config, mesh: Mapping[str, int], cut: Cut) -> dict[str, float]:
    model, trainer, stages, chunks = cut.model, cut.trainer, mesh["pipe"], config.parallel.chunks
    count = microbatch_count(config, mesh)
    idle = (stages - 1) / chunks if trainer.scans_layers else 0  # of a microbatch, in each direction
    layers = layers_per_stage(config, mesh) * (count + idle)
    width, shares = WIDTH[cut.numbers], stages if trainer.shares_vocabulary else 1
    weights = width * layer_parameters(model) / cut.tensor
    tables = 2 * model.padded_vocab_size * model.hidden_size / (cut.tensor * shares)
    keys = 2 * width * cut.samples * cut.sequence * model.kv_heads * model.head_size / cut.tensor
    # Gathered forward and backward and their gradients scattered, or round a ring: forward, backward, gradients.
    travelling = 3 * keys * ((cut.context - 1) / cut.context if cut.kernel == "ring" or not trainer.scans_layers else 1)
    over_context = layers * (travelling + weights * trainer.scans_layers) + count * 4 * tables * trainer.scans_layers
    held = weights_in_step(config, mesh, trainer)
    over_data = trainer.gradient_bytes + (width if config.parallel.zero else 0)
    vocabulary = 4 * cut.residual * count if trainer.shares_vocabulary and stages > 1 else 0
    return {
        "tensor": layers * _borders(cut) * cut.stream + (4 if cut.sequence_parallel else 2) * count * cut.stream,
        "context": over_context,
        "fsdp": layers * 3 * weights + count * (width + 4) * tables,
        "pipe": 2 * (count * chunks + (stages - 1) * trainer.scans_layers) * cut.residual + vocabulary,
        "data": over_data * held,
    }


def _borders(cut: Cut) -> int:
    """Gathers and scatters of the residual stream in a layer, without sequence parallelism all-reduces."""
    kept = {"none": ACTIVATION_NAMES, "selective": ACTIVATION_NAMES, "full": ()}.get(str(cut.remat), cut.remat)
    leaves = sum(not product.enters and product.makes not in (*kept, "output") for product in products(cut))
    return (10 if cut.sequence_parallel else 4) + leaves
