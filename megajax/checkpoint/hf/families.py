"""The families by the `model_type` of config.json."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from megajax.checkpoint.hf.bert import BERT, ROBERTA
from megajax.checkpoint.hf.bloom import BLOOM
from megajax.checkpoint.hf.family import Family
from megajax.checkpoint.hf.gpt2 import GPT2
from megajax.checkpoint.hf.llama import LLAMA
from megajax.checkpoint.hf.megatron_bert import MEGATRON_BERT
from megajax.checkpoint.hf.mistral import MISTRAL
from megajax.checkpoint.hf.mixtral import MIXTRAL
from megajax.checkpoint.hf.qwen import QWEN2, QWEN3
from megajax.checkpoint.hf.qwen_moe import QWEN2_MOE, QWEN3_MOE
from megajax.checkpoint.hf.settings import Settings
from megajax.checkpoint.hf.t5 import T5
from megajax.config.base import ConfigError
from megajax.config.model import ModelConfig

ALL = (GPT2, LLAMA, MISTRAL, QWEN2, QWEN3, MIXTRAL, QWEN2_MOE, QWEN3_MOE, BLOOM, BERT, MEGATRON_BERT, ROBERTA, T5)
FAMILIES = {family.model_type: family for family in ALL}


def family_of(settings: dict[str, Any]) -> Family:
    """The family that a config.json names.

    Raises:
        ConfigError: it is none of those here.
    """
    name = settings.get("model_type")
    if name not in FAMILIES:
        raise ConfigError(f"config.json: model_type is {name}, which megajax lacks: it has {', '.join(FAMILIES)}")
    return FAMILIES[name]


def family_for(model: ModelConfig) -> Family:
    """The first family that has a model: one whose settings, written and read back, mean the same.

    Raises:
        ConfigError: none has.
    """
    lost = {family.model_type: _lost(family, model) for family in ALL}
    nearest = min(lost, key=lambda name: len(lost[name]))
    if lost[nearest]:
        raise ConfigError(
            f"no family of Hugging Face has this model: {nearest}, the nearest, lacks {', '.join(lost[nearest])}"
        )
    return FAMILIES[nearest]


def _lost(family: Family, model: ModelConfig) -> list[str]:
    """What settings would not tell: the fields of a model that come back as something else."""
    pooler = ["pooler.dense.weight"] if model.pair_task else []
    before = _architecture(model)
    try:
        after = _architecture(family.read(Settings(family.write(model), pooler)))
    except ValueError:  # no words at all, or none that mean anything
        after = {}
    return [f"model.{name}={value}" for name, value in before.items() if after.get(name, "") != value]


def _architecture(model: ModelConfig) -> dict[str, Any]:
    """What the outputs of a model depend on, with the defaults worked out."""
    resolved = replace(
        model,
        num_kv_heads=model.kv_heads,
        head_dim=model.head_size,
        ffn_hidden_size=None if model.experts else model.ffn_size,
        expert_ffn_size=model.expert_size if model.experts else None,
        encoder_layers=(model.encoder_layers or model.num_layers) if model.family == "t5" else None,
        qkv_bias=model.has_qkv_bias,
    )
    training = {"attention_dropout", "hidden_dropout", "init_std", "balance_loss", "z_loss", "vocab_multiple"}
    return {name: value for name, value in vars(resolved).items() if name not in training}
