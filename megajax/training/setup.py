"""The start of a run: completing its configuration, and announcing the run.

The tokenizer implies a vocabulary size, the checkpoint holds the schedule so far, and process 0 prints configuration,
sizes and data.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

import jax
from jax.sharding import Mesh

from megajax.config.base import InputError
from megajax.config.checks import check_config
from megajax.config.config import Config
from megajax.config.data import DataConfig
from megajax.config.parallel import fit_vocabulary
from megajax.config.train import OptimConfig, TrainConfig
from megajax.costs.device import Device
from megajax.costs.flops import count_flops
from megajax.costs.hardware import Peak, table_peak
from megajax.costs.memory import describe_logits, state_bytes
from megajax.costs.weights import parameter_count
from megajax.data.build import build_datasets
from megajax.data.consumed import Mix, TrainingData
from megajax.data.dataset import Dataset
from megajax.data.samples import Recipe
from megajax.data.tokenizers import Tokenizer, build_tokenizer
from megajax.models.families import model_class
from megajax.observe.memory import device_memory
from megajax.observe.throughput import Throughput, measured_matmul_peak
from megajax.parallel.kernels import Kernel
from megajax.parallel.pipeline.schedule import Interleaved1F1B
from megajax.training.run_directory import RunDirectory
from megajax.training.schedule import Schedule, Stretch

ATTENTION_FLOPS: Literal["full", "causal"] = "causal"
"""Convention by which model FLOPs are counted: Megatron-LM's since core 0.12."""


def fit_to_tokenizer(config: Config) -> tuple[Config, Tokenizer]:
    """Load the run's tokenizer, and give the model the vocabulary size that it implies.

    Raises:
        InputError: the tokenizer cannot be used, or has more ids than `model.vocab_size`.
    """
    tokenizer = build_tokenizer(config.tokenizer)
    wanted = config.model.vocab_size
    if wanted is not None and wanted < tokenizer.vocab_size:
        origin, remedy = "", "unset it, or raise it"
        if config.init_from is not None:  # unset, the tokenizer is that model's
            origin = f" (that of init_from {config.init_from}, if not given beside it)"
            remedy = f"set it to {tokenizer.vocab_size} or more, or keep the tokenizer of that model"
        raise InputError(
            f"model.vocab_size is {wanted}{origin} but the tokenizer has {tokenizer.vocab_size} ids: {remedy}"
        )
    model = replace(config.model, vocab_size=wanted or tokenizer.vocab_size)
    config = replace(config, model=fit_vocabulary(model, config.parallel))
    check_config(config)
    return config, tokenizer


def check_tokenizer(tokenizer: Tokenizer, record: dict[str, Any], run: RunDirectory) -> None:
    """Refuse a checkpoint that was trained with a tokenizer of other ids."""
    if record["tokenizer"] != tokenizer.identity:
        changed = [key for key, value in tokenizer.identity.items() if record["tokenizer"].get(key) != value]
        raise InputError(
            f"the tokenizer of {run.path} changed since its checkpoint ({', '.join(changed)}): "
            "restore the old files, or choose another output_dir"
        )


def datasets_of(
    config: Config, tokenizer: Tokenizer, samples: int, consumed: int, record: dict[str, Any] | None
) -> dict[str, Dataset | None]:
    """Build the datasets of a run by split, which are None for splits without documents.

    Args:
        config: configuration with the token files.
        tokenizer: tokenizer of the run.
        samples: training samples from the first step to the last.
        consumed: training samples before this start.
        record: record of the checkpoint that is resumed, if there is one.
    """
    held_out = None if config.evaluation.steps else 0  # one epoch, or nothing
    counts = {"train": samples, "valid": held_out, "test": held_out}
    before = Mix.from_record(record["data"]) if record else None
    recipe = Recipe(config.data, tokenizer, config.data.kind_for(config.model.family), config.model.pair_task)
    share = (jax.process_index(), jax.process_count())
    return build_datasets(recipe, counts, config.train.seed, before, consumed, share)


def training_data(config: DataConfig, datasets: Mapping[str, Dataset | None]) -> TrainingData:
    """Return the dataset on which the run is trained.

    Raises:
        InputError: there is no training data.
    """
    data = datasets["train"]
    if not isinstance(data, TrainingData):
        raise InputError(f"data.split {config.split} leaves no document to train on")
    return data


def stretches_before(record: dict[str, Any] | None) -> list[Stretch]:
    """List the stretches of a run up to the checkpoint with this record; earlier versions knew only one batch size."""
    if record is None:
        return []
    size = record["batch_size"]
    return [Stretch(*numbers) for numbers in record.get("stretches", [(0, size, size)])]


def changes(
    record: dict[str, Any], train: TrainConfig, optim: OptimConfig, samples: int, schedule: Schedule
) -> list[str]:
    """List what has changed since a checkpoint was written, as far as it decides which samples are read when.

    Args:
        record: record of the checkpoint.
        train: batch size and length, as configured now.
        optim: learning-rate schedule, as configured now.
        samples: length of the whole run in samples, as it is now.
        schedule: resolved learning-rate schedule, as it is now.
    """
    size, lines, varies = train.global_batch_size, [], optim.decay_style != "constant"
    if record["batch_size"] != size:
        lines.append(
            f"global batch: {size} samples instead of {record['batch_size']}, from step {record['step'] + 1} on; "
            f"the learning rate goes on by {'steps' if train.steps else 'samples'} as planned"
        )
    if record["samples"] != samples:
        lines.append(f"length: {samples:,} samples instead of {record['samples']:,}")
    if varies and schedule.decay != record.get("decay", schedule.decay):
        lines.append("the learning rate decays over the new length, as optim.decay_steps or decay_samples is not set")
    return lines


def throughput_of(config: Config, mesh: Mesh) -> Throughput:
    """Return the cost of a sample and the peak of the devices, from which MFU follows."""
    peak = device_peak(jax.devices()[0], config.train.precision, config.log.peak_tflops)
    family = model_class(config.model)
    decoder = family.decoder_tokens(config.data)
    return Throughput(
        flops_per_sample=count_flops(config.model, 1, config.data.seq_length, ATTENTION_FLOPS, decoder).model,
        tokens_per_sample=config.data.seq_length + decoder,
        devices=mesh.size,
        attention=family.sees,  # a bidirectional model is charged for all scores
        peak_flops=peak.flops,
        peak_label=peak.label,
    )


def device_peak(device: jax.Device, precision: str, override_tflops: float | None = None) -> Peak:
    """Return the dense peak of a device for matrix products in `precision` ("bf16", "fp16" or "fp32").

    A CPU is measured; simulated devices share its cores and therefore its peak.

    Args:
        device: any device of the mesh.
        precision: value of `train.precision`.
        override_tflops: value of `log.peak_tflops`; 0 = no MFU.
    """
    if override_tflops is not None:
        return Peak(override_tflops * 1e12 or None, f"{override_tflops:g} TFLOP/s from log.peak_tflops")
    if device.platform == "cpu":
        flops = measured_matmul_peak(precision) / device.client.local_device_count()
        return Peak(flops, f"{flops / 1e12:.3f} TFLOP/s, measured {precision} matrix product on this CPU")
    return table_peak(device.device_kind, precision)


def announce(
    config: Config,
    mesh: Mesh,
    kernel: Kernel,
    datasets: Mapping[str, Dataset | None],
    steps: int,
    resumed_step: int,
    run: RunDirectory,
) -> None:
    """Print run, mesh, kernel, policies, sizes and data on process 0."""
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
        rows["pipeline"] = _pipeline(Device(config, mesh.shape).schedule)
    for name, text in rows.items():
        print(f"{name:>10}: {text}")


def _pipeline(schedule: Interleaved1F1B) -> str:
    few = "; fewer microbatches than stages leave stages idle" if schedule.microbatches < schedule.stages else ""
    return (
        f"{schedule.stages} stages x {schedule.chunks} chunks, {schedule.microbatches} microbatches: "
        f"bubble {schedule.bubble_fraction:.0%} of the ideal time{few}"
    )


def announce_data(data: TrainingData, consumed: int, changed: Sequence[str]) -> None:
    """Print, on process 0, where every source goes on and how often it will have been read at the end of the run."""
    if jax.process_index() > 0:
        return
    head = [f"goes on at sample {consumed:,}, none is left out or comes twice"] if consumed else []
    lines = [*head, *changed, *data.table(consumed)]
    print("   sources: " + f"\n{'':12}".join(lines))
