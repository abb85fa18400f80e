"""What a model family cannot be, and which layouts it has; keys that it would ignore are in `config.switches`."""

from __future__ import annotations

from megajax.config.base import InputError
from megajax.config.config import Config
from megajax.config.model import ModelConfig

_POSITIONS = {"gpt": ("learned", "rope", "alibi", "none"), "bert": ("learned",), "t5": ("relative",)}


def check_family(config: Config) -> None:
    """Refuse positions, heads, biases and layouts that the model's family does not have.

    Raises:
        InputError: names the key and the remedy.
    """
    model = config.model
    positions, allowed = model.positions, _POSITIONS[model.family]
    if positions not in allowed:
        remedy = f"use {' or '.join(allowed)}"
        raise InputError(f"model.positions {positions} does not go with model.family {model.family}: {remedy}")
    if model.family == "bert" and not model.tied_head:
        raise InputError("model.tied_head: the head of bert is its embedding, leave it true")
    if model.family == "t5":
        _check_t5(model)
        _check_t5_layout(config)


def _check_t5(model: ModelConfig) -> None:
    if model.kv_heads != model.num_heads:
        raise InputError(f"model.num_kv_heads is {model.num_kv_heads}: t5 has one per head, leave it unset")
    if model.bias or model.has_qkv_bias:
        raise InputError("model.bias: t5 has no biases, set model.bias=false")
    if model.embedding_norm:
        raise InputError("model.embedding_norm: t5 has none, set it to false")
    buckets, far = model.relative_buckets, model.relative_max_distance
    if buckets % 4 or far <= buckets // 2:
        raise InputError(
            f"model.relative_buckets {buckets} and relative_max_distance {far}: "
            "use a multiple of 4, and a distance of more than half of it"
        )


def _check_t5_layout(config: Config) -> None:
    parallel, length = config.parallel, config.data.decoder_seq_length
    for axis in ("pipe", "context"):
        if (size := getattr(parallel, axis)) > 1:
            raise InputError(
                f"parallel.{axis}={size}: the decoder of t5 looks at all of its encoder, leave it at 1 and use "
                "parallel.tensor or parallel.fsdp"
            )
    if parallel.sequence_parallel and length % parallel.tensor:
        raise InputError(
            f"data.decoder_seq_length {length} is not a multiple of parallel.tensor {parallel.tensor}: "
            "change one of them, or set parallel.sequence_parallel=false"
        )
