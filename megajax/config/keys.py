"""The dotted keys of the configuration (`optim.lr`): what each one holds, and which one a wrong key may have meant."""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from dataclasses import is_dataclass
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, cast, get_args, get_origin

from pydantic.fields import FieldInfo

from megajax.config.base import IS_PATH
from megajax.config.config import Config


def _walk(component: Any, prefix: str = "") -> Iterator[tuple[str, FieldInfo]]:
    for name, field in component.__pydantic_fields__.items():
        if is_dataclass(field.annotation):
            yield from _walk(field.annotation, f"{prefix}{name}.")
        else:
            yield prefix + name, field


FIELDS: dict[str, FieldInfo] = dict(_walk(Config))
"""Every key with its type, default and meaning, in the order of the components."""
SECTIONS: dict[str, str] = {
    name: str(field.annotation.__doc__)
    for name, field in cast(Any, Config).__pydantic_fields__.items()
    if is_dataclass(field.annotation)
}
"""Keys that hold other keys (model, data, train, ...), with their meaning."""


def _takes(annotation: Any, kind: Any) -> bool:
    """Whether values of a type are, or hold, those of a kind: a class, or a mark that `Annotated` bears."""
    inner = [part for part in get_args(annotation) if get_origin(annotation) is not Literal]
    return annotation is kind or kind in inner or any(_takes(part, kind) for part in inner)


TEXT_KEYS = frozenset(key for key, field in FIELDS.items() if _takes(field.annotation, str))
"""Keys whose value is a text or a list of texts."""
PATH_KEYS = tuple(
    key for key, field in FIELDS.items() if IS_PATH in field.metadata or _takes(field.annotation, IS_PATH)
)
"""Keys whose value names files or folders."""

# What users of Megatron-LM and Hugging Face type, section by section; a switch with the value that it stands for here.
_OTHER_NAMES = {
    "": {"output_dir": "save load", "init_from": "pretrained_checkpoint finetune no_load_optim no_load_rng"},
    "model": {
        "num_layers": "num_hidden_layers n_layer n_layers decoder_num_layers",
        "encoder_layers": "encoder_num_layers",
        "hidden_size": "n_embd d_model dim",
        "num_heads": "num_attention_heads n_head n_heads",
        "num_kv_heads": "num_query_groups num_key_value_heads n_kv_heads group_query_attention",
        "head_dim": "kv_channels",
        "ffn_hidden_size": "intermediate_size n_inner",
        "max_positions": "max_position_embeddings n_positions n_ctx",
        "vocab_multiple": "make_vocab_size_divisible_by",
        "positions": "position_embedding_type use_rotary_position_embeddings=rope no_position_embedding=none",
        "rope_base": "rotary_base rope_theta",
        "rope_fraction": "rotary_percent partial_rotary_factor",
        "norm": "normalization",
        "norm_eps": "norm_epsilon layernorm_epsilon layer_norm_epsilon rms_norm_eps",
        "activation": "swiglu=swiglu squared_relu=squared_relu hidden_act activation_function",
        "bias": "disable_bias_linear=false add_bias_linear",
        "qkv_bias": "add_qkv_bias=true",
        "qk_norm": "qk_layernorm=true",
        "tied_head": "untie_embeddings_and_output_weights=false tie_word_embeddings",
        "init_std": "init_method_std initializer_range",
        "window": "sliding_window window_size",
        "attention_scale": "softmax_scale",
        "relative_buckets": "relative_attention_num_buckets",
        "relative_max_distance": "relative_attention_max_distance",
        "rope_scaling_factor": "rope_scaling use_rope_scaling=8",
        "token_types": "type_vocab_size",
        "pair_task": "bert_binary_head bert_no_binary_head=false",
        "experts": "num_experts num_local_experts",
        "experts_per_token": "moe_router_topk num_experts_per_tok",
        "expert_ffn_size": "moe_ffn_hidden_size moe_intermediate_size",
        "shared_ffn_size": "moe_shared_expert_intermediate_size shared_expert_intermediate_size",
        "shared_gate": "moe_shared_expert_gate=true",
        "router_renormalize": "norm_topk_prob moe_router_pre_softmax=false",
        "balance_loss": "moe_aux_loss_coeff router_aux_loss_coef",
        "z_loss": "moe_z_loss_coeff",
    },
    "tokenizer": {
        "type": "tokenizer_type",
        "model": "tokenizer_model",
        "vocab": "vocab_file",
        "merges": "merge_file merges_file",
        "extra_ids": "vocab_extra_ids",
        "tiktoken_special_ids": "tiktoken_num_special_tokens",
    },
    "data": {
        "path": "data_path",
        "train_path": "train_data_path",
        "valid_path": "valid_data_path",
        "test_path": "test_data_path",
        "text_key": "json_keys",
        "seq_length": "encoder_seq_length",
        "decoder_seq_length": "decoder_sequence_length",
        "mock": "mock_data=true",
        "kind": "sft=instruction",
        "fim_rate": "fim_data",
        "mask_prob": "mlm_probability",
        "mask_eod_loss": "eod_mask_loss=true",
        "reset_positions": "reset_position_ids=true",
        "reset_attention": "reset_attention_mask=true",
        "cache_dir": "data_cache_path",
        "prefetch": "num_workers",
    },
    "train": {
        "steps": "train_iters max_steps",
        "samples": "train_samples",
        "global_batch_size": "batch_size",
        "micro_batch_size": "per_device_train_batch_size",
        "rampup": "rampup_batch_size",
        "precision": "bf16=bf16 fp16=fp16 dtype",
        "remat": "recompute_granularity recompute_activations=selective recompute_modules gradient_checkpointing=full",
        "exit_duration": "exit_duration_in_mins",
        "deterministic": "deterministic_mode=true",
        "attention": "attention_backend use_flash_attn attn_implementation",
    },
    "optim": {
        "name": "optimizer",
        "lr": "learning_rate",
        "beta1": "adam_beta1",
        "beta2": "adam_beta2",
        "eps": "adam_eps adam_epsilon",
        "momentum": "sgd_momentum",
        "clip_grad": "max_grad_norm gradient_clip_val",
        "decay_style": "lr_decay_style lr_scheduler_type",
        "warmup_init_lr": "lr_warmup_init",
        "warmup_steps": "lr_warmup_iters",
        "warmup_samples": "lr_warmup_samples",
        "warmup_fraction": "lr_warmup_fraction warmup_ratio",
        "decay_steps": "lr_decay_iters",
        "decay_samples": "lr_decay_samples",
        "wsd_steps": "lr_wsd_decay_iters",
        "wsd_samples": "lr_wsd_decay_samples",
        "wsd_style": "lr_wsd_decay_style",
    },
    "loss_scale": {
        "constant": "loss_scale",
        "initial": "initial_loss_scale",
        "minimum": "min_loss_scale",
        "window": "loss_scale_window",
    },
    "health": {"spike_factor": "check_for_spiky_loss"},
    "parallel": {
        "pipe": "pipeline_model_parallel_size pp",
        "chunks": "num_virtual_stages_per_pipeline_rank num_layers_per_virtual_pipeline_stage=LAYERS/(PIPE*N)",
        "zero": "use_distributed_optimizer=1",
        "data": "data_parallel_size dp",
        "fsdp": "data_parallel_sharding_strategy use_megatron_fsdp=DEVICES use_torch_fsdp2=DEVICES",
        "expert": "expert_model_parallel_size ep",
        "context": "context_parallel_size cp",
        "tensor": "tensor_model_parallel_size tp",
    },
    "checkpoint": {
        "every": "save_interval save_steps",
        "keep_last": "save_total_limit most_recent_k",
        "keep_every": "save_retain_interval",
        "asynchronous": "async_save=true",
        "local_every": "non_persistent_save_interval",
    },
    "profile": {"start": "profile_step_start", "stop": "profile_step_end"},
    "evaluation": {"every": "eval_interval eval_steps", "steps": "eval_iters"},
    "log": {
        "every": "log_interval logging_steps",
        "params_norm": "log_params_norm=true",
        "tensorboard": "tensorboard_dir=true",
    },
}
_SPELT = [
    (f"{section}.{name}".lstrip("."), *other.partition("=")[::2])
    for section, names in _OTHER_NAMES.items()
    for name, others in names.items()
    for other in others.split()
]
OTHER_NAMES: dict[str, str] = {other: key for key, other, _ in _SPELT}
"""Name elsewhere -> key here."""
_VALUES: dict[str, str] = {other: value for _, other, value in _SPELT if value}
"""Switch elsewhere -> value here."""
MEGATRON_TOKENIZERS: dict[str, dict[str, Any]] = {
    "SentencePieceTokenizer": {"type": "sentencepiece", "special_ids": True},
    "GPTSentencePieceTokenizer": {"type": "sentencepiece"},
    "Llama2Tokenizer": {"type": "sentencepiece", "bos": True},
    "GPT2BPETokenizer": {"type": "gpt2_bpe"},
    "HuggingFaceTokenizer": {"type": "huggingface"},
    "BertWordPieceLowerCase": {"type": "bert_wordpiece"},
    "BertWordPieceCase": {"type": "bert_wordpiece", "lower_case": False},
    "TikTokenizer": {"type": "tiktoken"},
    "NullTokenizer": {"type": "null"},
}
"""Megatron-LM's `--tokenizer-type` -> values of `tokenizer.*`."""


def first_key(section: str) -> str:
    """The first key of a section."""
    return next(key for key in FIELDS if key.startswith(f"{section}."))


def nearest(key: str) -> list[str]:
    """Real keys that a wrong key (or `--flag`) may have meant, best first; empty when nothing is near."""
    key = _plain(key)
    name = key.rpartition(".")[2]
    if name in OTHER_NAMES:
        return [OTHER_NAMES[name]]
    misplaced = [real for real in FIELDS if real.rpartition(".")[2] == name]
    if misplaced:
        return difflib.get_close_matches(key, misplaced, n=1, cutoff=0.8) or misplaced
    by_key = difflib.get_close_matches(key, FIELDS, n=1, cutoff=0.7)
    names = {real.rpartition(".")[2]: real for real in FIELDS}
    by_name = [names[near] for near in difflib.get_close_matches(name, names, n=1, cutoff=0.7)]
    return by_key or by_name


def value_for(key: str) -> str | None:
    """The value that a switch of another program stands for; None for what is no such switch."""
    return _VALUES.get(_plain(key).rpartition(".")[2])


def did_you_mean(key: str) -> str:
    """The end of an error message about an unknown key."""
    near = nearest(key)
    if near and (value := value_for(key)):
        return f"did you mean `{near[0]}={value}`?"
    return "did you mean " + " or ".join(f"`{real}`" for real in near) + "?" if near else "--help lists all keys"


def _plain(key: str) -> str:
    return key.lstrip("-").lower().replace("-", "_")


def type_name(annotation: Any) -> str:
    """A field's type for readers: `int`, `cosine | linear`, `[int, int, int]`; None is not named (it means unset)."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return type_name(arguments[0])
    if origin is Literal:
        return " | ".join(map(str, arguments))
    if origin in (Union, UnionType):
        return " | ".join(type_name(argument) for argument in arguments if argument is not NoneType)
    if origin is tuple:
        return "[" + ", ".join("..." if argument is Ellipsis else type_name(argument) for argument in arguments) + "]"
    return str(annotation.__name__)
