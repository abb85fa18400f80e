"""Time of a training step: matrix products, memory traffic and communication over the peaks of the GPU.

Every microbatch goes through the layers of each stage; while the pipeline fills and drains, stages wait. Once a step,
gradients and weights cross `data` and the optimizer runs. Communication beside computation counts only for the time by
which it is longer, and for that by which it slows the computation down.

Predictions are compared with published step times in tests/planning/test_step_time.py. They do not include the reading
of data, evaluation, checkpoints, slow devices among many, and congestion of a shared network.

Letters: P stages, v chunks per stage, M microbatches, L layers.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from megajax.config.config import Config
from megajax.config.model import ModelConfig
from megajax.costs.device import Device
from megajax.costs.flops import AttentionConvention, count_flops
from megajax.costs.hardware import Gpu
from megajax.costs.weights import MOMENTS, layer_weights, table_parameters
from megajax.models.families import model_class
from megajax.planning.cut import MEGAJAX, Cut, Trainer
from megajax.planning.layer_time import layer_work, vocabulary_work
from megajax.planning.operations import (
    WIDTH,
    Work,
    beside,
    gather_seconds,
    memory_seconds,
    peak_flops,
    send_seconds,
    total,
)

STEP = 5e-3
"""Seconds of a step that nothing hides: start of the program, norm of all gradients, metrics."""
LABELS = {
    "matmul": "matrix products",
    "attention": "attention",
    "memory": "memory traffic",
    "tensor": "communication over tensor",
    "context": "communication over context",
    "fsdp": "communication over fsdp",
    "expert": "communication over expert",
    "pipe": "communication over pipe",
    "data": "communication over data",
    "bubble": "pipeline bubble",
    "optimizer": "optimizer",
    "overhead": "overhead",
}


@dataclass(frozen=True)
class StepTime:
    """The predicted time of one step, to which `parts` add up; only exposed communication counts."""

    parts: Mapping[str, float]
    """Seconds of each part, by the keys of LABELS."""
    model: ModelConfig
    batch: int
    """Number of samples in a step."""
    sequence: int
    """Number of tokens in a sample (t5: of the encoder)."""
    decoder_sequence: int
    """Number of tokens in a sample of t5's decoder; else 0."""
    devices: int
    peak: float
    """Peak FLOP/s of one device, in the numeric format of the blocks' matrix products."""
    executed_flops: float
    """FLOPs of a step on all devices, including recomputed ones and excluding masked scores of fused attention."""
    compiled_flops: float
    """FLOPs of a step in one device's program, including the slots in which a pipeline fills and drains."""

    @property
    def seconds(self) -> float:
        """Return the seconds of a step."""
        return sum(self.parts.values())

    @property
    def tokens_per_second(self) -> float:
        """Return the tokens per second of all devices together."""
        return self.batch * (self.sequence + self.decoder_sequence) / self.seconds

    def tflops(self, attention: AttentionConvention) -> float:
        """Return the model TFLOP/s of one device."""
        flops = count_flops(self.model, self.batch, self.sequence, attention, self.decoder_sequence).model
        return flops / self.devices / self.seconds / 1e12

    def mfu(self, attention: AttentionConvention) -> float:
        """Return the model FLOPs divided by those of the devices at their peak."""
        return self.tflops(attention) * 1e12 / self.peak

    @property
    def hfu(self) -> float:
        """Return the executed FLOPs divided by those of the devices at their peak."""
        return self.executed_flops / self.devices / self.seconds / self.peak

    def days(self, tokens: float) -> float:
        """Return the days that training on `tokens` tokens takes without an interruption."""
        return tokens / self.tokens_per_second / 86_400

    def gpu_hours(self, tokens: float) -> float:
        """Return the GPU-hours that training on `tokens` tokens takes."""
        return 24 * self.days(tokens) * self.devices

    @property
    def limit(self) -> str:
        """Return the longest part and the next one: "matrix products 71 %, pipeline bubble 9 %"."""
        longest = sorted(self.parts.items(), key=lambda part: -part[1])[:2]
        return ", ".join(f"{LABELS[name]} {seconds / self.seconds:.0%}".replace("%", " %") for name, seconds in longest)


def step_time(config: Config, mesh: Mapping[str, int], gpu: Gpu, trainer: Trainer = MEGAJAX) -> StepTime:
    """Predict the time of a step.

    Args:
        config: configuration with a known vocabulary, whose layout is that of the mesh.
        mesh: size of every axis.
        gpu: type of GPU, which also gives the number of GPUs in a node.
        trainer: training program.

    Raises:
        InputError: the configured attention kernel cannot run, or the GPU lacks the numeric format.
    """
    device, cuts = Device(config, mesh), cuts_of(config, mesh, gpu, trainer)
    cut = cuts[-1]
    busiest, mean = _microbatch(device, cuts)
    work = busiest * device.microbatches
    parts = {name: seconds for name, seconds in vars(work).items() if name != "flops"}
    idle = (mesh["pipe"] - 1) / config.parallel.chunks
    parts["bubble"] = mean.seconds * idle
    parts["data"] = _over_data(device, cut, busiest)
    parts["optimizer"] = _optimizer(device, cut)
    parts["overhead"] = STEP
    devices = math.prod(mesh.values())
    masked = mean * (idle if trainer.scans_layers else 0)
    return StepTime(
        parts=parts,
        model=config.model,
        batch=config.train.global_batch_size,
        sequence=config.data.seq_length,
        decoder_sequence=model_class(config.model).decoder_tokens(config.data),
        devices=devices,
        peak=peak_flops(gpu, cut.products),
        executed_flops=work.flops * devices,
        compiled_flops=work.flops + masked.flops,
    )


def cuts_of(config: Config, mesh: Mapping[str, int], gpu: Gpu, trainer: Trainer) -> tuple[Cut, ...]:
    """Return a device's share of a layer of every stack."""
    return tuple(Cut.of(config, mesh, gpu, trainer, stack) for stack in Device(config, mesh).stacks)


def _microbatch(device: Device, cuts: Sequence[Cut]) -> tuple[Work, Work]:
    """Return the work of a microbatch (both passes), on the busiest stage and on one without embedding and head."""
    cut, before = cuts[-1], zip(device.stacks, cuts[:-1], strict=False)
    stages, chunks, stride = device.mesh["pipe"], device.config.parallel.chunks, device.stride("pipe")
    layers = device.layers
    forward, backward = layer_work(cut)
    layer = forward + backward
    hop = 2 * send_seconds(cut.gpu, cut.residual, stages, stride)
    hides = cut.trainer.hides_neighbours and chunks > 1
    hops = Work(pipe=chunks * beside(hop, layer.seconds * layers / chunks if hides else 0))
    stage = layer * layers + hops
    stage += total(sum(layer_work(encoder), Work()) * stack.layers for stack, encoder in before)
    shares = cut.trainer.shares_vocabulary
    vocabulary = vocabulary_work(cut, stages if shares else 1, stride)
    if shares or stages == 1:
        return stage + vocabulary, stage
    spare = stages * layers > device.config.model.num_layers
    last = layer * (layers - spare) + hops + vocabulary
    return max(stage, last, key=lambda work: work.seconds), stage


def weights_in_step(device: Device, trainer: Trainer) -> float:
    """Return the number of weights that a device of the fullest stage holds during a step."""
    model, mesh = device.config.model, device.mesh
    tables = table_parameters(model) / (mesh["pipe"] if trainer.shares_vocabulary else 1)
    blocks = 0.0
    for number, stack in enumerate(reversed(device.stacks)):
        layers = stack.layers if number else device.layers
        weights = layer_weights(model, crossed=stack.memory > 0)
        blocks += layers * weights.on_device(mesh["tensor"], mesh["expert"], device.config.parallel.whole_heads)
    return (blocks + tables / mesh["tensor"]) / mesh["fsdp"]


def _over_data(device: Device, cut: Cut, microbatch: Work) -> float:
    """Return the exposed seconds of communication over `data`.

    Gradients are reduce-scattered; then weights are gathered under ZeRO-1, and gradients otherwise.
    """
    trainer, mesh, parallel = cut.trainer, device.mesh, device.config.parallel
    replicas, stride = mesh["data"], device.stride("data")
    if not trainer.scans_layers:  # context shards are replicas too, the nearest ones
        replicas, stride = replicas * mesh["context"], device.stride("context") if mesh["context"] > 1 else stride
    number = weights_in_step(device, trainer)
    reduce = gather_seconds(cut.gpu, trainer.gradient_bytes * number, replicas, stride)
    width = WIDTH[cut.numbers] if parallel.zero else trainer.gradient_bytes
    gather = gather_seconds(cut.gpu, width * number, replicas, stride)
    if not trainer.hides_data:
        return reduce + gather
    # A chunk's gradients are complete within the last group of microbatches, and its weights are needed in the first.
    group = min(device.microbatches, mesh["pipe"]) if parallel.chunks > 1 else 1
    forward = microbatch.seconds * group / 3
    layers = device.layers
    return beside(reduce, 2 * forward, reduce / layers) + beside(gather, forward, gather / layers)


def _optimizer(device: Device, cut: Cut) -> float:
    """Return the seconds of the optimizer.

    Norm, update and cast read the fp32 gradient twice, read and write weight and moments, read the weight again and
    write the copy.
    """
    at_rest = weights_in_step(device, cut.trainer) / (device.mesh["data"] if device.config.parallel.zero else 1)
    copy = 0 if cut.numbers == "fp32" else 4 + WIDTH[cut.numbers]
    traffic = 2 * 4 + 2 * 4 * (1 + MOMENTS[device.config.optim.name]) + copy
    return memory_seconds(cut.gpu, traffic * at_rest)
