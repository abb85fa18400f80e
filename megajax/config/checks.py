"""Checks across components that need no device: what would otherwise fail, or silently differ, deep in a run.

Letters: B global batch, b micro batch, S sequence, D embed, N heads, K kv heads, F mlp, V padded vocabulary.
"""

from __future__ import annotations

import difflib
import math

from megajax.config.base import InputError
from megajax.config.config import Config
from megajax.config.data import DataConfig, TokenizerConfig
from megajax.config.families import check_family
from megajax.config.model import ModelConfig
from megajax.config.optim import OptimConfig
from megajax.config.parallel import ParallelConfig
from megajax.config.switches import check_switches
from megajax.config.train import ACTIVATION_NAMES, TrainConfig


def check_config(config: Config) -> None:
    """Refuse values that do not fit together.

    Raises:
        InputError: names the keys, their numbers and the remedy.
    """
    check_switches(config)
    check_family(config)
    _check_heads(config.model)
    _check_experts(config.model, config.parallel)
    _check_shards(config.model, config.parallel)
    _check_sequence(config)
    _check_batch_sizes(config.train)
    # With `auto`, one replica is the least there can be: what one cannot divide, more cannot either.
    check_batch(config, 1 if config.parallel.data == "auto" else config.parallel.data)
    _check_remat(config.train)
    _check_units(config.train, config.optim)
    _check_schedule(config.train, config.optim)
    _check_sources(config.data)
    _check_kind(config)
    _check_tokenizer(config.tokenizer)


def check_training(config: Config) -> None:
    """Refuse a configuration that is sound but says too little to train: no length, data or vocabulary."""
    data = config.data
    if config.train.steps is None and config.train.samples is None:
        raise InputError("how long to train is not set: give train.steps=N or train.samples=N")
    if not (data.path or data.train_path or data.text or data.mock):
        raise InputError("no training data: give data.text=corpus.jsonl, or data.path=PREFIX of a tokenized corpus")
    checkpoint = config.checkpoint
    if (checkpoint.local is None) != (checkpoint.local_every is None):
        raise InputError("checkpoint.local and checkpoint.local_every belong together: set both, or neither")
    if checkpoint.keep_best and (config.evaluation.every is None or config.evaluation.steps == 0):
        raise InputError("checkpoint.keep_best goes by the validation loss: set evaluation.every and evaluation.steps")
    if config.health.spike_factor is not None and config.health.spike_factor <= 1:
        raise InputError(f"health.spike_factor is {config.health.spike_factor}: a spike is above 1 x the mean")
    sizeless = config.tokenizer.type == "null" and config.tokenizer.vocab_size is None
    if sizeless and (data.text or config.model.vocab_size is None):
        raise InputError("tokenizer.type null needs tokenizer.vocab_size: set it, or choose another tokenizer.type")


def check_batch(config: Config, data_size: int) -> None:
    """Refuse batch sizes that `data_size` replicas (mesh axis `data`) cannot share in whole micro batches."""
    train, fsdp, expert = config.train, config.parallel.fsdp, config.parallel.expert
    unit = train.micro_batch_size * data_size * fsdp * expert
    experts = f"x expert {expert} =" if expert > 1 else "="
    divisor = f"train.micro_batch_size {train.micro_batch_size} x data {data_size} x fsdp {fsdp} {experts}"
    sizes = {"train.global_batch_size": train.global_batch_size}
    if train.rampup:
        sizes |= {"train.rampup start": train.rampup[0], "train.rampup increment": train.rampup[1]}
    for name, size in sizes.items():
        _require_multiple(name, size, divisor, unit, f"use {_nearest_multiples(size, unit)}, or other sizes")
        if config.parallel.chunks > 1:
            stages = config.parallel.pipe
            remedy = "interleaved pipelines take microbatches in groups of one per stage: change the batch sizes"
            _require_multiple(f"microbatches ({name} / {unit})", size // unit, "parallel.pipe", stages, remedy)


def resolve_mesh(parallel: ParallelConfig, num_devices: int) -> dict[str, int]:
    """Size of every mesh axis, slowest first, with `auto` worked out.

    Raises:
        InputError: the mesh does not take exactly `num_devices` devices; shows the arithmetic.
    """
    sizes = parallel.sizes
    if parallel.data == "auto":
        others = {axis: size for axis, size in sizes.items() if axis != "data"}
        replica = math.prod(others.values())
        _require_multiple("the number of devices", num_devices, _product(others), replica, _MESH_REMEDY)
        sizes["data"] = num_devices // replica
    elif math.prod(sizes.values()) != num_devices:
        product = f"{_product(sizes)} {math.prod(sizes.values())}"
        raise InputError(f"the mesh takes {product} devices, but there are {num_devices}: {_MESH_REMEDY}")
    return sizes


_MESH_REMEDY = "change the parallel.* sizes, or the devices (parallel.simulate_devices=N needs no GPU)"


def _nearest_multiples(value: int, divisor: int) -> str:
    return " or ".join(str(n) for n in (value // divisor * divisor, -(-value // divisor) * divisor) if n)


def _product(sizes: dict[str, int]) -> str:
    return " x ".join(f"{axis} {size}" for axis, size in sizes.items()) + " ="


def _require_multiple(
    name: str, value: int, divisor_name: str, divisor: int, remedy: str, common: int = 0, step: int = 1
) -> None:
    """Refuse a value that is no multiple of a divisor, with the divisors that it would be a multiple of.

    Args:
        name: of the value.
        value: to be divided.
        divisor_name: the key that divides it, or a product of some that ends with "=".
        divisor: its size.
        remedy: what to change.
        common: what else the divisor has to divide, as one number: 0 = nothing.
        step: the divisor is always a multiple of it.
    """
    if value % divisor:
        remainder = f"{value} % {divisor} = {value % divisor}"
        sizes = [size for size in _divisors(math.gcd(value, common)) if size % step == 0]
        near = sorted(sorted(sizes, key=lambda size: abs(math.log(size / divisor)))[:_SHOWN])
        what = "products" if divisor_name.endswith("=") else f"sizes of {divisor_name}"
        works = f"{what} that work: {', '.join(map(str, near)) or 'none'}{', ...' if len(sizes) > len(near) else ''}"
        raise InputError(
            f"{name} {value} is not a multiple of {divisor_name} {divisor} ({remainder}): {remedy} ({works})"
        )


_SHOWN = 12
"""Sizes, those next to the one that does not work."""


def _divisors(number: int) -> list[int]:
    small = [n for n in range(1, math.isqrt(number) + 1) if number % n == 0]
    return sorted({*small, *(number // n for n in small)})


def _check_heads(model: ModelConfig) -> None:
    n, k = model.num_heads, model.kv_heads
    if k < 1:
        raise InputError(f"model.num_kv_heads is {k}: use a divisor of model.num_heads {n}, or leave it unset")
    remedy = "every key/value head serves the same number of query heads"
    _require_multiple("model.num_heads", n, "model.num_kv_heads", k, remedy)
    if model.head_dim is None:
        remedy = "change one of them, or set model.head_dim"
        _require_multiple("model.hidden_size", model.hidden_size, "model.num_heads", n, remedy)
    if model.ffn_size < 1:
        raise InputError(f"model.ffn_hidden_size comes out as 0 for hidden_size {model.hidden_size}: set it")


def _check_experts(model: ModelConfig, parallel: ParallelConfig) -> None:
    experts, k = model.experts, model.experts_per_token
    if experts == 0:
        if parallel.expert > 1:
            raise InputError(f"parallel.expert={parallel.expert} shards experts: set model.experts, or leave it at 1")
        return
    if model.family != "gpt":
        raise InputError(f"model.experts goes with model.family gpt, not {model.family}: leave it at 0")
    if model.bias:
        raise InputError("model.experts goes without biases: set model.bias=false (model.qkv_bias may stay)")
    if k > experts:
        raise InputError(
            f"model.experts_per_token {k} exceeds model.experts {experts}: lower the one or raise the other"
        )
    _require_multiple("model.experts", experts, "parallel.expert", parallel.expert, "choose one that divides them")


def _over_tensor(model: ModelConfig, parallel: ParallelConfig) -> dict[str, int]:
    """What of a model `parallel.tensor` has to divide."""
    sizes = {} if parallel.whole_heads else {"num_heads": model.num_heads, "num_kv_heads": model.kv_heads}
    if model.experts:
        sizes |= {"expert_ffn_size": model.expert_size, "shared_ffn_size": model.shared_ffn_size}
    else:
        sizes["ffn_hidden_size"] = model.ffn_size
    return sizes


def _check_shards(model: ModelConfig, parallel: ParallelConfig) -> None:
    stages, chunks = parallel.pipe, parallel.chunks
    if chunks > 1 and stages == 1:
        raise InputError(f"parallel.chunks={chunks} interleaves pipeline stages: set parallel.pipe, or leave it at 1")
    divisor = f"parallel.pipe {stages} x parallel.chunks {chunks} ="
    near = _nearest_multiples(model.num_layers, stages * chunks)
    _require_multiple("model.num_layers", model.num_layers, divisor, stages * chunks, f"use {near} layers")
    choice = "choose a parallel.tensor that divides them, or parallel.whole_heads=true"
    remedies = {"num_heads": choice, "num_kv_heads": f"key/value heads are split over tensor, never copied: {choice}"}
    over_tensor = _over_tensor(model, parallel)
    for key, size in over_tensor.items():
        remedy = remedies.get(key, "choose a parallel.tensor that divides it")
        common = math.gcd(*over_tensor.values())
        _require_multiple(f"model.{key}", size, "parallel.tensor", parallel.tensor, remedy, common)
    cut = "weights at rest are cut along it: choose a parallel.fsdp that divides it"
    _require_multiple("model.hidden_size", model.hidden_size, "parallel.fsdp", parallel.fsdp, cut)


def _check_sequence(config: Config) -> None:
    s, limit, parallel = config.data.seq_length, config.model.max_positions, config.parallel
    if s > limit:
        raise InputError(f"data.seq_length {s} exceeds model.max_positions {limit}: lower the one or raise the other")
    tensor = parallel.tensor if parallel.sequence_parallel else 1
    divisor = f"context {parallel.context} x tensor {tensor} ="
    remedy = "change data.seq_length, or set parallel.sequence_parallel=false"
    _require_multiple("data.seq_length", s, divisor, parallel.context * tensor, remedy)
    if parallel.context > 1:
        divisor = f"2 x context {parallel.context} ="
        remedy = "every context shard holds two pieces: change data.seq_length or parallel.context"
        _require_multiple("data.seq_length", s, divisor, 2 * parallel.context, remedy, step=2)


def _check_batch_sizes(train: TrainConfig) -> None:
    micro, size = train.micro_batch_size, train.global_batch_size
    if not 1 <= micro <= size:
        raise InputError(f"train.micro_batch_size is {micro}: use 1 to {size}, the train.global_batch_size")
    if train.rampup is None:
        return
    start, increment, _ = train.rampup
    if start > size:
        raise InputError(f"train.rampup starts at {start}, above train.global_batch_size {size}")
    way = f"train.rampup: {size} - {start} ="
    _require_multiple(way, size - start, "the increment", increment, "the last one has to end at the global batch size")
    if train.samples is None:
        raise InputError("train.rampup needs a run counted in samples: set train.samples, not train.steps")


def _check_remat(train: TrainConfig) -> None:
    for name in () if isinstance(train.remat, str) else train.remat:
        if name not in ACTIVATION_NAMES:
            near = difflib.get_close_matches(name, ACTIVATION_NAMES, n=1)
            hint = f"did you mean {near[0]}?" if near else f"the names are {', '.join(ACTIVATION_NAMES)}"
            raise InputError(f"train.remat: no activation is called {name}: {hint}")


def _check_units(train: TrainConfig, optim: OptimConfig) -> None:
    """The schedule counts as the run does: both in steps or both in samples, each length given once."""
    if train.steps is not None and train.samples is not None:
        raise InputError(f"train.steps {train.steps} and train.samples {train.samples} are both set: keep one")
    for unit, other, length in (("steps", "samples", train.steps), ("samples", "steps", train.samples)):
        for key in (f"warmup_{other}", f"decay_{other}", f"wsd_{other}"):
            if length is not None and getattr(optim, key):
                wanted = key.replace(other, unit)
                raise InputError(f"optim.{key} does not go with train.{unit}: use optim.{wanted}, or train.{other}")
    warmups = [key for key in ("warmup_steps", "warmup_samples", "warmup_fraction") if getattr(optim, key)]
    if len(warmups) > 1:
        raise InputError(" and ".join(f"optim.{key}" for key in warmups) + " are both set: keep one")


def _check_schedule(train: TrainConfig, optim: OptimConfig) -> None:
    for key in ("min_lr", "warmup_init_lr"):
        if getattr(optim, key) > optim.lr:
            raise InputError(f"optim.{key} {getattr(optim, key)} is above optim.lr {optim.lr}")
    is_wsd = optim.decay_style == "wsd"
    if is_wsd and optim.wsd_steps is None and optim.wsd_samples is None:
        raise InputError("optim.decay_style wsd needs the length of its last part: set optim.wsd_steps or wsd_samples")
    for unit in ("steps", "samples"):
        decay = getattr(optim, f"decay_{unit}") or getattr(train, unit)
        warmup, wsd = getattr(optim, f"warmup_{unit}"), getattr(optim, f"wsd_{unit}") or 0
        if decay is not None and warmup + wsd > decay:
            parts = f"optim.warmup_{unit} {warmup}" + (f" + optim.wsd_{unit} {wsd}" if wsd else "")
            raise InputError(f"{parts} is more than the {decay} {unit} of optim.decay_{unit} (unset: train.{unit})")


def _check_sources(data: DataConfig) -> None:
    given = [f"data.{key}" for key in ("path", "train_path", "text", "mock") if getattr(data, key)]
    if len(given) > 1:
        raise InputError(f"{' and '.join(given)} are both set: keep one")
    for key in ("valid_path", "test_path"):
        if getattr(data, key) and not data.train_path:
            raise InputError(f"data.{key} goes with data.train_path, which is not set")


def _check_kind(config: Config) -> None:
    kind, family = config.data.kind, config.model.family
    kinds = ("auto", "gpt", "instruction") if family == "gpt" else ("auto", family)
    if kind not in kinds:
        raise InputError(f"data.kind {kind} does not go with model.family {family}: use {' or '.join(kinds)}")


_TOKENIZER_FILES = {
    "sentencepiece": ("model",),
    "huggingface": ("model",),
    "tiktoken": ("model",),
    "gpt2_bpe": ("vocab", "merges"),
    "bert_wordpiece": ("vocab",),
    "null": (),
}

_TOKENIZER_SWITCHES = {
    "special_ids": "sentencepiece",
    "extra_ids_descend": "sentencepiece",
    "append_ends": "bert_wordpiece",
    "lower_case": "bert_wordpiece",
    "tiktoken_pattern": "tiktoken",
    "tiktoken_special_ids": "tiktoken",
}


def _check_tokenizer(tokenizer: TokenizerConfig) -> None:
    kind = tokenizer.type
    trains_its_own = kind in ("sentencepiece", "bert_wordpiece") and tokenizer.vocab_size is not None
    for key in () if trains_its_own else _TOKENIZER_FILES[kind]:
        if getattr(tokenizer, key) is None:
            raise InputError(f"tokenizer.type {kind} needs a file: set tokenizer.{key}")
    for key, wanted in _TOKENIZER_SWITCHES.items():
        if kind != wanted and getattr(tokenizer, key) != getattr(TokenizerConfig(), key):
            raise InputError(f"tokenizer.{key} goes with tokenizer.type {wanted}, not {kind}: leave it unset")
