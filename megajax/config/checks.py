"""Checks across components, which need no device, of what would otherwise fail or silently differ deep in a run.

Every component checks its own values when it is built. Letters: S sequence, F width of the MLP, as everywhere.
"""

from __future__ import annotations

import math

from megajax.config.base import InputError
from megajax.config.config import Config
from megajax.config.data import DataConfig
from megajax.config.keys import FIELDS, flat_values, with_kind
from megajax.config.model import SAMPLE_KINDS, ModelConfig
from megajax.config.needs import refuse_ignored_keys, require_multiple
from megajax.config.parallel import ParallelConfig
from megajax.config.train import OptimConfig, TrainConfig


def check_config(config: Config) -> None:
    """Refuse components that do not fit together.

    Raises:
        InputError: they do not; the message names the keys, their numbers and the remedy.
    """
    model, data, parallel = config.model, config.data, config.parallel
    refuse_ignored_keys(FIELDS, with_kind(flat_values(config)))
    if model.is_encoder_decoder:
        _check_two_stacks(model.family, data, parallel)
    _check_shards(model, parallel)
    _check_sequence(model, data, parallel)
    # With `auto`, one replica is the least there can be: what one cannot divide, more cannot either.
    check_batch(config.train, parallel, 1 if parallel.data == "auto" else parallel.data)
    _check_schedule(config.train, config.optim)
    _check_kind(data.kind, model.family)


def check_training(config: Config) -> None:
    """Refuse a configuration that says too little to train, whose length, data or vocabulary is missing."""
    data = config.data
    if config.train.steps is None and config.train.samples is None:
        raise InputError("how long to train is not set: give train.steps=N or train.samples=N")
    if not (data.path or data.train_path or data.text or data.mock):
        raise InputError("no training data: give data.text=corpus.jsonl, or data.path=PREFIX of a tokenized corpus")
    if config.checkpoint.keep_best and (config.evaluation.every is None or config.evaluation.steps == 0):
        raise InputError("checkpoint.keep_best goes by the validation loss: set evaluation.every and evaluation.steps")
    sizeless = config.tokenizer.type == "null" and config.tokenizer.vocab_size is None
    if sizeless and (data.text or config.model.vocab_size is None):
        raise InputError("tokenizer.type null needs tokenizer.vocab_size: set it, or choose another tokenizer.type")


def check_batch(train: TrainConfig, parallel: ParallelConfig, data_size: int) -> None:
    """Refuse batch sizes that `data_size` replicas (mesh axis `data`) cannot share in whole micro batches."""
    fsdp, expert = parallel.fsdp, parallel.expert
    unit = train.micro_batch_size * data_size * fsdp * expert
    experts = f"x expert {expert} =" if expert > 1 else "="
    divisor = f"train.micro_batch_size {train.micro_batch_size} x data {data_size} x fsdp {fsdp} {experts}"
    sizes = {"train.global_batch_size": train.global_batch_size}
    if train.rampup:
        sizes |= {"train.rampup start": train.rampup[0], "train.rampup increment": train.rampup[1]}
    for name, size in sizes.items():
        require_multiple(name, size, divisor, unit, f"use {_nearest_multiples(size, unit)}, or other sizes")
        if parallel.chunks > 1:
            remedy = "interleaved pipelines take microbatches in groups of one per stage: change the batch sizes"
            require_multiple(f"microbatches ({name} / {unit})", size // unit, "parallel.pipe", parallel.pipe, remedy)


def _nearest_multiples(value: int, divisor: int) -> str:
    return " or ".join(str(n) for n in (value // divisor * divisor, -(-value // divisor) * divisor) if n)


def _check_kind(kind: str, family: str) -> None:
    kinds = ("auto", *SAMPLE_KINDS[family])
    if kind not in kinds:
        raise InputError(f"data.kind {kind} does not go with model.family {family}: use {' or '.join(kinds)}")


def _check_two_stacks(family: str, data: DataConfig, parallel: ParallelConfig) -> None:
    for axis in ("pipe", "context"):
        if (size := getattr(parallel, axis)) > 1:
            raise InputError(
                f"parallel.{axis}={size}: the decoder of {family} looks at all of its encoder, leave it at 1 and use "
                "parallel.tensor or parallel.fsdp"
            )
    if parallel.sequence_parallel and data.decoder_seq_length % parallel.tensor:
        raise InputError(
            f"data.decoder_seq_length {data.decoder_seq_length} is not a multiple of parallel.tensor "
            f"{parallel.tensor}: change one of them, or set parallel.sequence_parallel=false"
        )


def _check_shards(model: ModelConfig, parallel: ParallelConfig) -> None:
    if model.experts:
        remedy = "choose one that divides them"
        require_multiple("model.experts", model.experts, "parallel.expert", parallel.expert, remedy)
    elif parallel.expert > 1:
        raise InputError(f"parallel.expert={parallel.expert} shards experts: set model.experts, or leave it at 1")
    if parallel.chunks > 1 and parallel.pipe == 1:  # not in the component: who runs no pipeline has own words for it
        raise InputError(
            f"parallel.chunks={parallel.chunks} interleaves pipeline stages: set parallel.pipe, or leave it at 1"
        )
    if model.dense_layers and parallel.pipe > 1:
        raise InputError(
            f"parallel.pipe={parallel.pipe}: all stages run the same program, but model.dense_layers are in the first "
            "one only; leave parallel.pipe at 1"
        )
    chunks = parallel.pipe * parallel.chunks
    divisor = f"parallel.pipe {parallel.pipe} x parallel.chunks {parallel.chunks} ="
    near = _nearest_multiples(model.num_layers, chunks)
    require_multiple("model.num_layers", model.num_layers, divisor, chunks, f"use {near} layers")
    period, held = len(model.kind_pattern), model.num_layers // chunks
    if parallel.pipe > 1 and held % period:
        raise InputError(
            f"model.layer_pattern has {period} layers, and a stage of parallel.pipe {parallel.pipe} x parallel.chunks "
            f"{parallel.chunks} has {held} in a chunk: all run the same program, choose them so that it has whole "
            "patterns"
        )
    choice = "choose a parallel.tensor that divides them, or parallel.whole_heads=true"
    remedies = {"num_heads": choice, "num_kv_heads": f"key/value heads are split over tensor, never copied: {choice}"}
    over_tensor = _over_tensor(model, parallel)
    for key, size in over_tensor.items():
        remedy = remedies.get(key, "choose a parallel.tensor that divides it")
        common = math.gcd(*over_tensor.values())
        require_multiple(f"model.{key}", size, "parallel.tensor", parallel.tensor, remedy, common)
    cut = "weights at rest are cut along it: choose a parallel.fsdp that divides it"
    require_multiple("model.hidden_size", model.hidden_size, "parallel.fsdp", parallel.fsdp, cut)


def _over_tensor(model: ModelConfig, parallel: ParallelConfig) -> dict[str, int]:
    """Return the sizes of a model that `parallel.tensor` has to divide, by the name of their field."""
    sizes = {} if parallel.whole_heads else {"num_heads": model.num_heads, "num_kv_heads": model.kv_heads}
    if model.experts:
        sizes |= {"expert_ffn_size": model.expert_size, "shared_ffn_size": model.shared_ffn_size}
    if model.dense_layers or not model.experts:
        sizes["ffn_hidden_size"] = model.ffn_size
    return sizes


def _check_sequence(model: ModelConfig, data: DataConfig, parallel: ParallelConfig) -> None:
    s, limit = data.seq_length, model.max_positions
    if s > limit:
        raise InputError(f"data.seq_length {s} exceeds model.max_positions {limit}: lower the one or raise the other")
    tensor = parallel.tensor if parallel.sequence_parallel else 1
    divisor = f"context {parallel.context} x tensor {tensor} ="
    remedy = "change data.seq_length, or set parallel.sequence_parallel=false"
    require_multiple("data.seq_length", s, divisor, parallel.context * tensor, remedy)
    if parallel.context > 1:
        divisor = f"2 x context {parallel.context} ="
        remedy = "every context shard holds two pieces: change data.seq_length or parallel.context"
        require_multiple("data.seq_length", s, divisor, 2 * parallel.context, remedy, step=2)


def _check_schedule(train: TrainConfig, optim: OptimConfig) -> None:
    """Refuse a schedule that does not count as the run does, in steps or in samples, or that is longer than the run."""
    for unit, other, length in (("steps", "samples", train.steps), ("samples", "steps", train.samples)):
        for key in (f"warmup_{other}", f"decay_{other}", f"wsd_{other}"):
            if length is not None and getattr(optim, key):
                wanted = key.replace(other, unit)
                raise InputError(f"optim.{key} does not go with train.{unit}: use optim.{wanted}, or train.{other}")
    for unit in ("steps", "samples"):
        decay = getattr(optim, f"decay_{unit}") or getattr(train, unit)
        warmup, wsd = getattr(optim, f"warmup_{unit}"), getattr(optim, f"wsd_{unit}") or 0
        if decay is not None and warmup + wsd > decay:
            parts = f"optim.warmup_{unit} {warmup}" + (f" + optim.wsd_{unit} {wsd}" if wsd else "")
            raise InputError(f"{parts} is more than the {decay} {unit} of optim.decay_{unit} (unset: train.{unit})")
