"""Loud choices: what a run is about to do, said once at the start."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import Literal

import jax
from jax.sharding import Mesh

from megajax.config.config import Config
from megajax.config.parallel import REPLICAS
from megajax.costs.flops import count_flops
from megajax.costs.hardware import device_peak
from megajax.costs.memory import describe_logits, state_bytes
from megajax.costs.sizes import parameter_count
from megajax.data.consumed import TrainingData
from megajax.data.dataset import Dataset
from megajax.models.families import model_class
from megajax.observe.memory import device_memory
from megajax.observe.throughput import Throughput
from megajax.parallel.kernels import Kernel
from megajax.parallel.pipeline.schedule import Interleaved1F1B
from megajax.training.run_directory import RunDirectory

ATTENTION_FLOPS: Literal["full", "causal"] = "causal"
"""Convention of the model FLOPs: Megatron-LM's since core 0.12."""


def throughput_of(config: Config, mesh: Mesh) -> Throughput:
    """What a sample costs and what the devices could do, for MFU."""
    peak = device_peak(jax.devices()[0], config.train.precision, config.log.peak_tflops)
    family = model_class(config.model)
    decoder = family.decoder_tokens(config.data)
    return Throughput(
        flops_per_sample=count_flops(config.model, 1, config.data.seq_length, ATTENTION_FLOPS, decoder).model,
        tokens_per_sample=config.data.seq_length + decoder,
        devices=mesh.size,
        attention=family.sees,  # who looks both ways is charged for all scores
        peak_flops=peak.flops,
        peak_label=peak.label,
    )


def announce(
    config: Config,
    mesh: Mesh,
    kernel: Kernel,
    datasets: Mapping[str, Dataset | None],
    steps: int,
    resumed_step: int,
    run: RunDirectory,
) -> None:
    """Print run, mesh, kernel, policies, sizes and data, on process 0."""
    if jax.process_index() > 0:
        return
    train, model = config.train, config.model
    axes = " x ".join(f"{axis} {size}" for axis, size in mesh.shape.items() if size > 1) or "one device"
    sequence = "on" if config.parallel.sequence_parallel and mesh.shape["tensor"] > 1 else "off"
    count = parameter_count(model)
    held = state_bytes(config, mesh.shape)
    memory = device_memory()
    sizes = ", ".join(f"{name} {len(data) if data else 0:,}" for name, data in datasets.items())
    start = f"resumed at step {resumed_step}" if resumed_step else "new"
    rows = {
        "run": f"{run.path} ({start} of {steps} steps)",
        "mesh": f"{axes} ({jax.devices()[0].device_kind}), sequence parallel {sequence}",
        "model": f"{count / 1e6:,.1f} M parameters, vocabulary {model.vocab_size} in {model.padded_vocab_size} rows",
        "memory": f"about {held / 2**30:.3f} GiB a device for fp32 weights, gradients and optimizer state",
        "logits": describe_logits(config, mesh.shape, memory.limit if memory else None),
        "precision": f"{train.precision}, remat {train.remat}",
        "attention": f"{kernel.name} ({kernel.reason})",
        "batch": f"{train.global_batch_size} x {config.data.seq_length} tokens, micro batch {train.micro_batch_size}",
        "samples": sizes,
    }
    if config.parallel.pipe > 1:
        rows["pipeline"] = _pipeline(config, mesh)
    for name, text in rows.items():
        print(f"{name:>10}: {text}")


def _pipeline(config: Config, mesh: Mesh) -> str:
    train, parallel = config.train, config.parallel
    microbatches = train.global_batch_size // (train.micro_batch_size * prod(mesh.shape[axis] for axis in REPLICAS))
    schedule = Interleaved1F1B(parallel.pipe, parallel.chunks, microbatches)
    few = "; fewer microbatches than stages leave stages idle" if microbatches < parallel.pipe else ""
    return (
        f"{parallel.pipe} stages x {parallel.chunks} chunks, {microbatches} microbatches: "
        f"bubble {schedule.bubble_fraction:.0%} of the ideal time{few}"
    )


def announce_data(data: TrainingData, consumed: int, changed: Sequence[str]) -> None:
    """Print, on process 0, where every source goes on and how often it will have been read by the end of the run."""
    if jax.process_index() > 0:
        return
    head = [f"goes on at sample {consumed:,}, none is left out or comes twice"] if consumed else []
    lines = [*head, *changed, *data.table(consumed)]
    print("   sources: " + f"\n{'':12}".join(lines))
