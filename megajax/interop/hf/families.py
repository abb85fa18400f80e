"""The families by the `model_type` of config.json."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import fields, replace
from typing import Any

from megajax.config.base import InputError
from megajax.config.model import ModelConfig
from megajax.interop.hf.decoders import DECODERS
from megajax.interop.hf.encoders import ENCODERS
from megajax.interop.hf.family import Family

ALL = (*DECODERS, *ENCODERS)
FAMILIES = {family.model_type: family for family in ALL}


def family_of(settings: Mapping[str, Any]) -> Family:
    """The family that a config.json names.

    Raises:
        InputError: it is none of those here.
    """
    name = settings.get("model_type")
    if not isinstance(name, str) or name not in FAMILIES:
        raise InputError(f"config.json: model_type is {name!s:.60}, which megajax lacks: it has {', '.join(FAMILIES)}")
    return FAMILIES[name]


def family_for(model: ModelConfig) -> Family:
    """The first family that has a model: one whose settings, written and read back, mean the same.

    Raises:
        InputError: none has.
    """
    pooler = ["pooler.dense.weight"] if model.pair_task else []
    lacking = {family.model_type: lost(family, family.write(model), model, pooler) for family in ALL}
    nearest = min(lacking, key=lambda name: len(lacking[name]))
    if lacking[nearest]:
        raise InputError(
            f"no family of Hugging Face has this model: {nearest}, the nearest, lacks {', '.join(lacking[nearest])}"
        )
    return FAMILIES[nearest]


def updated_settings(
    came: Mapping[str, Any], family: Family, model: ModelConfig, tensors: Collection[str]
) -> dict[str, Any]:
    """A config.json as it came, but for what is another model's by now (a longer context, say).

    Args:
        came: its values.
        family: that of the model.
        model: as it is now.
        tensors: names of those that came with it.

    Raises:
        InputError: the family has no words for what has changed.
    """
    before, now = family.write(family.described(came, tensors)), family.write(model)
    changed = {key: value for key, value in now.items() if key not in before or value != before[key]}
    stale = {alias for alias, key in family.aliases.items() if key in changed}
    if {"rope_theta", "rope_scaling"} & changed.keys():  # `rope_parameters` is another form of both
        stale.add("rope_parameters")
        changed |= {key: now[key] for key in ("rope_theta", "rope_scaling")}
    settings = {key: value for key, value in came.items() if key not in stale} | changed
    new = lost(family, came, model, tensors)
    if fields := [field for field in lost(family, settings, model, tensors) if field in new]:
        raise InputError(
            f"{family.model_type} of Hugging Face has no {', '.join(fields)}, to which the run has changed its model: "
            "it cannot be exported"
        )
    return settings


def lost(family: Family, settings: Mapping[str, Any], model: ModelConfig, tensors: Collection[str]) -> list[str]:
    """What settings do not tell of a model beside tensors of these names: the fields that come back as something else,
    among those that its outputs depend on.
    """
    before = _architecture(model)
    try:
        after = _architecture(family.described(settings, tensors))
    except InputError:  # no words at all, or none that mean anything
        after = {}
    return [f"model.{name}={value}" for name, value in before.items() if after.get(name, "") != value]


TRAINING = {"attention_dropout", "hidden_dropout", "init_std", "balance_loss", "z_loss", "vocab_multiple"}
"""Fields that outputs do not depend on."""
IDLE = {
    "rope_": lambda model: model.positions != "rope",
    "relative_": lambda model: model.positions != "relative",
    "rope_low_": lambda model: model.rope_scaling_factor is None,
    "rope_high_": lambda model: model.rope_scaling_factor is None,
    "rope_original_": lambda model: model.rope_scaling_factor is None,
    "expert": lambda model: not model.experts,
    "router_": lambda model: not model.experts,
    "shared_": lambda model: not model.experts,
    "position_offset": lambda model: model.positions != "learned",
}
"""What fields begin with -> when no output depends on them."""


def _architecture(model: ModelConfig) -> dict[str, Any]:
    """What the outputs of a model depend on, with the defaults worked out."""
    resolved = replace(
        model,
        num_kv_heads=model.kv_heads,
        head_dim=model.head_size,
        ffn_hidden_size=None if model.experts else model.ffn_size or None,
        expert_ffn_size=(model.expert_size or None) if model.experts else None,
        encoder_layers=(model.encoder_layers or model.num_layers) if model.family == "t5" else None,
        qkv_bias=model.has_qkv_bias,
    )
    idle = tuple(start for start, is_idle in IDLE.items() if is_idle(model))
    names = (field.name for field in fields(ModelConfig) if field.name not in TRAINING)
    return {name: getattr(resolved, name) for name in names if name == "experts" or not name.startswith(idle)}
