"""Choice of a family, by the `model_type` of config.json or by the model that it can describe."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import fields
from typing import Any

from megajax.config.base import InputError
from megajax.config.model import ModelConfig
from megajax.interop.hf.decoders import DECODERS
from megajax.interop.hf.encoders import ENCODERS
from megajax.interop.hf.family import WORKED_OUT, Family
from megajax.interop.hf.gemma import GEMMA2, GEMMA3
from megajax.interop.hf.mixtures import MIXTURES

ALL = (*DECODERS, *MIXTURES, GEMMA2, GEMMA3, *ENCODERS)
FAMILIES = {family.model_type: family for family in ALL}


def family_of(settings: Mapping[str, Any]) -> Family:
    """Return the family that a config.json names.

    Raises:
        InputError: the file names none of the families here.
    """
    name = settings.get("model_type")
    if not isinstance(name, str) or name not in FAMILIES:
        raise InputError(f"config.json: model_type is {name!s:.60}, which megajax lacks: it has {', '.join(FAMILIES)}")
    return FAMILIES[name]


def family_for(model: ModelConfig) -> Family:
    """Return the first family whose settings of a model, written and read back, mean the same.

    Raises:
        InputError: no family has such settings.
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
    """Return a config.json as it came, except for keys that have changed with the model (a longer context, say).

    Args:
        came: values of config.json as it came.
        family: family to which the model belongs.
        model: model as it is now.
        tensors: names of the tensors that came with it.

    Raises:
        InputError: the family has no words for what has changed.
    """
    before, now = family.write(family.described(came, tensors)), family.write(model)
    changed = {key: value for key, value in now.items() if key not in before or value != before[key]}
    stale = {alias for alias, key in family.aliases.items() if key in changed}
    for row in family.rows:
        if row.forms and not changed.keys().isdisjoint(written := row.write(model)):
            stale |= set(row.forms)
            changed |= written
    settings = {key: value for key, value in came.items() if key not in stale} | changed
    new = lost(family, came, model, tensors)
    if names := [field for field in lost(family, settings, model, tensors) if field in new]:
        raise InputError(
            f"{family.model_type} of Hugging Face has no {', '.join(names)}, to which the run has changed its model: "
            "it cannot be exported"
        )
    return settings


def lost(family: Family, settings: Mapping[str, Any], model: ModelConfig, tensors: Collection[str]) -> list[str]:
    """List the fields of a model that settings, beside tensors of these names, do not tell.

    These fields come back as something else; fields that the model's outputs do not depend on are left out.
    """
    before = _architecture(model)
    try:
        after = _architecture(family.described(settings, tensors))
    except InputError:  # no words at all, or none that mean anything
        after = {}
    return [f"model.{name}={value}" for name, value in before.items() if after.get(name, "") != value]


TRAINING = {"attention_dropout", "hidden_dropout", "init_std", "balance_loss", "z_loss", "vocab_multiple"}
"""Fields on which outputs do not depend."""
MODEL_FIELDS = tuple(field.name for field in fields(ModelConfig) if field.name not in TRAINING)
IDLE = {
    "rope_": lambda model: model.positions != "rope",
    "relative_": lambda model: model.positions != "relative",
    "rope_local_": lambda model: not model.layer_pattern,
    "rope_low_": lambda model: model.rope_scaling_factor is None,
    "rope_high_": lambda model: model.rope_scaling_factor is None,
    "rope_original_": lambda model: model.rope_scaling_factor is None,
    "expert": lambda model: not model.experts,
    "dense_": lambda model: not model.experts,
    "router_": lambda model: not model.experts,
    "shared_": lambda model: not model.experts,
    "position_offset": lambda model: model.positions != "learned",
}
"""Beginning of names of fields -> the condition under which no output depends on them."""


def _architecture(model: ModelConfig) -> dict[str, Any]:
    """Return the fields on which the outputs of a model depend, with the defaults worked out."""
    idle = tuple(start for start, is_idle in IDLE.items() if is_idle(model))
    names = [name for name in MODEL_FIELDS if name == "experts" or not name.startswith(idle)]
    values = {name: getattr(model, WORKED_OUT.get(name, name)) for name in names}
    values["ffn_hidden_size"] = None if model.experts else model.ffn_size or None
    values["layer_pattern"] = model.layer_kinds if model.layer_pattern else ()
    values["encoder_layers"] = (model.encoder_layers or model.num_layers) if model.family == "t5" else None
    return values
