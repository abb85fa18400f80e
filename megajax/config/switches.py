"""Which key needs which other key: where that is not so, the key would be ignored, and is refused instead."""

from __future__ import annotations

from typing import Any, NamedTuple

from megajax.config.base import InputError
from megajax.config.config import Config
from megajax.config.keys import FIELDS
from megajax.config.yaml_text import yaml_text


class Needs(NamedTuple):
    """Keys that mean something only where another key has one of some values."""

    key: str
    values: tuple[str | None, ...]
    """Any that is set (not 0, false, unset or empty) where there is none."""
    keys: tuple[str, ...]
    others: tuple[str, ...] = ()
    """Other keys, of which any that is set gives them a meaning as well."""


NEEDS = (
    Needs("model.family", ("gpt",), ("model.window",)),
    Needs(
        "model.family",
        ("bert",),
        (
            "model.token_types",
            "model.pair_task",
            "model.position_offset",
            "model.head_activation",
            "model.norm_placement",
        ),
    ),
    Needs(
        "model.family",
        ("t5",),
        ("model.encoder_layers", "model.relative_buckets", "model.relative_max_distance", "data.decoder_seq_length"),
    ),
    Needs("model.positions", ("rope",), ("model.rope_base", "model.rope_fraction", "model.rope_scaling_factor")),
    Needs(
        "model.rope_scaling_factor",
        (),
        ("model.rope_low_frequency", "model.rope_high_frequency", "model.rope_original_positions"),
    ),
    Needs(
        "model.experts",
        (),
        (
            "model.experts_per_token",
            "model.expert_ffn_size",
            "model.shared_ffn_size",
            "model.router_renormalize",
            "model.balance_loss",
            "model.z_loss",
        ),
    ),
    Needs("model.shared_ffn_size", (), ("model.shared_gate",)),
    Needs("data.kind", ("bert", "t5"), ("data.mask_prob", "data.short_seq_prob")),
    Needs("data.kind", ("gpt",), ("data.mask_eod_loss", "data.reset_positions", "data.reset_attention")),
    Needs("data.fim_rate", (), ("data.fim_spm_rate", "data.fim_tokens")),
    Needs("model.positions", ("learned", "rope"), ("data.reset_positions",)),
    Needs("optim.name", ("sgd", "muon"), ("optim.momentum",)),
    Needs("optim.name", ("adamw", "lion", "muon"), ("optim.beta1", "optim.beta2")),
    Needs("optim.name", ("adamw", "muon"), ("optim.eps",)),
    Needs("optim.decay_style", ("linear", "cosine", "inverse_sqrt", "wsd"), ("optim.min_lr",)),
    Needs(
        "optim.decay_style",
        ("linear", "cosine", "inverse_sqrt", "wsd"),
        ("optim.decay_steps", "optim.decay_samples"),
        ("optim.warmup_fraction",),
    ),
    Needs("optim.decay_style", ("wsd",), ("optim.wsd_style", "optim.wsd_steps", "optim.wsd_samples")),
    Needs("optim.warmup_steps", (), ("optim.warmup_init_lr",), ("optim.warmup_samples", "optim.warmup_fraction")),
    Needs(
        "train.precision",
        ("fp16",),
        (
            "loss_scale.constant",
            "loss_scale.initial",
            "loss_scale.minimum",
            "loss_scale.window",
            "loss_scale.hysteresis",
            "loss_scale.max_skips_at_minimum",
        ),
    ),
    Needs(
        "loss_scale.constant",
        (None,),
        ("loss_scale.initial", "loss_scale.minimum", "loss_scale.window", "loss_scale.hysteresis"),
    ),
    Needs("health.spike_factor", (), ("health.window",)),
    Needs("health.policy", ("skip", "rollback"), ("health.patience",)),
    Needs("log.sample_prompt", (), ("log.sample_tokens",)),
)


def check_switches(config: Config) -> None:
    """Refuse a key that is set where it would be ignored.

    Raises:
        InputError: names the key, what it needs and the remedy.
    """
    for key, needs in ignored_keys(config).items():
        value, there = value_of(config, key), yaml_text(value_of(config, needs.key))
        default = yaml_text(FIELDS[key].default)  # to be given where a preset sets the key
        if needs.values:
            right = " or ".join([f"{needs.key} {' or '.join(map(yaml_text, needs.values))}", *needs.others])
            raise InputError(f"{key} is for {right}, not {there}: leave it at its default {default} (it is {value})")
        right = " or ".join([needs.key, *needs.others])
        raise InputError(
            f"{key} is {value} without {right}, to which it belongs: set that, or leave it at its default {default}"
        )


def ignored_keys(config: Config) -> dict[str, Needs]:
    """Keys that are set where they are ignored, and what they need."""
    found: dict[str, Needs] = {}
    for needs in NEEDS:
        there = value_of(config, needs.key)
        if there in needs.values or (there and not needs.values) or any(value_of(config, key) for key in needs.others):
            continue
        for key in needs.keys:
            if value_of(config, key) != FIELDS[key].default:
                found.setdefault(key, needs)
    return found


def value_of(config: Config, key: str) -> Any:
    """The value of a dotted key; of `data.kind` what samples are in the end."""
    if key == "data.kind":
        return config.data.kind_for(config.model.family)
    section, name = key.split(".")
    return getattr(getattr(config, section), name)
