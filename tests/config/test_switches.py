"""No key is accepted and ignored: a key that would change nothing is refused."""

from __future__ import annotations

from copy import copy
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from megajax.config import Config, InputError, check_config, load_config
from megajax.config.keys import FIELDS, flat_values
from megajax.config.needs import Needs
from megajax.config.train import OptimConfig
from megajax.models.dropout import sample_keys
from megajax.models.families import batch_arrays, build_model
from megajax.models.layout import Layout
from megajax.models.losses import objective
from megajax.models.model import Model
from megajax.training.schedule import Schedule, learning_rate

SMALL = (
    "model.vocab_size=90 model.num_layers=2 model.hidden_size=32 model.num_heads=4 model.max_positions=32 "
    "model.ffn_hidden_size=48 data.seq_length=16 train.steps=10 parallel.data=1"
)
T5 = "model.family=t5 model.positions=relative model.bias=false model.norm=rmsnorm data.decoder_seq_length=12"
MODELS = {
    "gpt": "",
    "rope": "model.positions=rope model.rope_scaling_factor=8 model.bias=false model.activation=swiglu",
    "alibi": "model.positions=alibi",
    "mixture": "model.experts=4 model.bias=false model.shared_ffn_size=16",
    "bert": "model.family=bert",
    "t5": T5,
    "gemma": "model.positions=rope model.window=3 model.layer_pattern=[local,global] model.rope_local_base=100",
}
OTHERS = {
    "family": "", "num_layers": "4", "encoder_layers": "3", "hidden_size": "64", "num_heads": "2", "num_kv_heads": "2",
    "head_dim": "16", "ffn_hidden_size": "64", "max_positions": "64", "vocab_size": "400", "vocab_multiple": "96",
    "positions": "none", "position_offset": "2", "rope_base": "500", "rope_fraction": "0.5", "rope_scaling_factor": "4",
    "rope_low_frequency": "2", "rope_high_frequency": "8", "rope_original_positions": "16", "relative_buckets": "16",
    "relative_max_distance": "64", "window": "4", "attention_scale": "0.5", "norm_plus_one": "true",
    "rope_local_base": "500", "layer_pattern": "[global,local]", "attention_softcap": "4", "logit_softcap": "4",
    "branch_norm": "true", "embedding_scale": "true", "norm": "rmsnorm", "norm_placement": "post",
    "embedding_norm": "true", "norm_eps": "1e-3", "activation": "relu", "head_activation": "gelu_exact",
    "bias": "false", "qkv_bias": "true", "qk_norm": "true", "tied_head": "false", "token_types": "2",
    "pair_task": "true", "experts": "8", "experts_per_token": "3", "expert_ffn_size": "24", "shared_ffn_size": "32",
    "dense_layers": "1", "shared_gate": "true", "router_renormalize": "false", "balance_loss": "0.1", "z_loss": "0.1",
    "attention_dropout": "0.1", "hidden_dropout": "0.1", "init_std": "0.1",
}  # fmt: skip
"""Another value than any of `MODELS` has, for every key of the model."""
SAME = {
    ("max_positions", "rope"), ("max_positions", "alibi"), ("max_positions", "t5"),  # how long a sequence may be
    ("max_positions", "gemma"),
    ("norm", "t5"), ("bias", "rope"), ("bias", "mixture"), ("bias", "t5"), ("qkv_bias", "gpt"), ("qkv_bias", "alibi"),
    ("qkv_bias", "gemma"),
    ("qkv_bias", "bert"),  # the value that it has already
}  # fmt: skip
"""Keys of the model that do not change the program of one of `MODELS`."""


def config_of(*words: str) -> Config:
    """A checked configuration."""
    config = load_config(None, " ".join([SMALL, *words]).split()).config
    check_config(config)
    return config


def program(config: Config) -> str:
    """Initialisation and loss of a model as JAX traces them, with the objective's factors."""
    rows = batch_arrays(config.model, config.data).items()
    batch = {name: jax.ShapeDtypeStruct((2, *array.shape), array.dtype) for name, array in rows}
    batch["weights"] = jax.ShapeDtypeStruct(batch["loss_mask"].shape, jnp.float32)
    batch["sample_weights"] = jax.ShapeDtypeStruct((2,), jnp.float32)

    def losses(model: Model, batch: dict[str, jax.Array]) -> jax.Array:
        keys = sample_keys(0, jnp.int32(0), batch["sample_ids"])
        return objective(model.losses(batch, model.context(batch, Layout(), keys)), config.model)

    init = lambda key: build_model(key, config.model)  # noqa: E731
    model = jax.eval_shape(init, jax.random.key(0))
    traced = jax.make_jaxpr(init)(jax.random.key(0)), jax.make_jaxpr(losses)(model, batch)
    return "".join(f"{jaxpr} {[np.asarray(const).tolist() for const in jaxpr.consts]}" for jaxpr in traced)


@cache
def unchanged(name: str) -> str:
    return program(config_of(MODELS[name]))


def test_every_key_of_the_model_is_tried() -> None:
    assert {f"model.{key}" for key in OTHERS} == {key for key in FIELDS if key.startswith("model.")}


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_a_key_of_the_model_changes_it_or_is_refused(name: str) -> None:
    ignored = []
    for key, value in OTHERS.items():
        try:
            config = config_of(MODELS[name], f"model.{key}={value}" if value else "")
        except InputError as error:
            assert "model." in str(error), (key, error)
            continue
        if program(config) == unchanged(name):
            ignored.append((key, name))
    assert set(ignored) - {("family", name)} <= SAME, ignored


GOVERNED = [(mark, key) for key, field in FIELDS.items() for mark in field.metadata if isinstance(mark, Needs)]
VALUES = {
    "data.decoder_seq_length": "12",
    "data.mask_prob": "0.2", "data.short_seq_prob": "0.2", "data.fim_spm_rate": "0.1",
    "data.fim_tokens": "[a,b,c]", "data.mask_eod_loss": "true",
    "data.reset_positions": "true", "data.reset_attention": "true",
    "optim.momentum": "0.5", "optim.beta1": "0.5", "optim.beta2": "0.5", "optim.eps": "0.5",
    "optim.min_lr": "1e-5", "optim.decay_steps": "8", "optim.decay_samples": "80", "optim.warmup_init_lr": "1e-5",
    "optim.wsd_style": "linear", "optim.wsd_steps": "2", "optim.wsd_samples": "2", "loss_scale.constant": "8",
    "loss_scale.initial": "8", "loss_scale.minimum": "2", "loss_scale.window": "7", "loss_scale.hysteresis": "3",
    "loss_scale.max_skips_at_minimum": "3", "health.window": "7", "health.patience": "7",
    "log.sample_tokens": "7", "data.valid_path": "a", "data.test_path": "a",
    "tokenizer.special_ids": "true", "tokenizer.extra_ids_descend": "true", "tokenizer.append_ends": "false",
    "tokenizer.lower_case": "false", "tokenizer.tiktoken_pattern": "v1", "tokenizer.tiktoken_special_ids": "9",
} | {f"model.{key}": value for key, value in OTHERS.items()}  # fmt: skip
RIGHT = {
    "model.window": "model.window=4", "model.layer_pattern": MODELS["gemma"], "model.positions": MODELS["gemma"],
    "model.rope_scaling_factor": MODELS["rope"],
    "model.experts": "model.experts=4 model.bias=false", "model.shared_ffn_size": MODELS["mixture"],
    "data.fim_rate": "data.fim_rate=0.5", "data.train_path": "data.train_path=a",
    "train.precision": "train.precision=fp16",
    "health.spike_factor": "health.spike_factor=3", "health.policy": "health.policy=skip",
    "optim.warmup_steps": "optim.warmup_steps=2", "optim.warmup_samples": "train.steps=null train.samples=100 "
    "optim.warmup_samples=20", "optim.warmup_fraction": "optim.warmup_fraction=0.1",
    "loss_scale.constant": "train.precision=fp16", "log.sample_prompt": "log.sample_prompt=5",
}  # fmt: skip
FAMILIES = {"gpt": "model.positions=rope model.window=4", "bert": MODELS["bert"], "t5": T5}


def right(key: str, value: str | None) -> str:
    """Words that give a governing key one of the values that it should have."""
    if key in ("model.family", "data.kind"):
        return FAMILIES[str(value)]
    if key == "optim.decay_style":
        return f"{key}={value} optim.wsd_steps={1 if value == 'wsd' else 'null'}"
    if key == "tokenizer.type":
        return f"{key}={value} tokenizer.model=a tokenizer.vocab_size=99"
    return f"{key}={value}" if key == "optim.name" else RIGHT[key]


def wrong(key: str, values: tuple[str | None, ...]) -> str:
    """Words that give it another value."""
    if key in ("model.family", "data.kind"):
        return next(words for family, words in FAMILIES.items() if family not in values)
    rule = "optim.name=sgd" if "lion" in values else "optim.name=lion"
    style = f"optim.decay_style={'linear' if values == ('wsd',) else 'constant'}"
    return {
        "optim.name": rule, "model.layer_pattern": "model.positions=rope",
        "model.positions": "model.positions=none", "optim.decay_style": style,
        "loss_scale.constant": "train.precision=fp16 loss_scale.constant=8",
    }.get(key, "")  # fmt: skip


@pytest.mark.parametrize(("needs", "key"), GOVERNED, ids=[f"{key}-{needs.key}" for needs, key in GOVERNED])
def test_a_key_is_refused_without_what_it_needs(needs: Needs, key: str) -> None:
    """By name; with what it needs, or at its default, it is taken."""
    word = f"{key}={VALUES[key]}"
    without = wrong(needs.key, needs.values)
    config_of(without)
    with pytest.raises(InputError) as caught:
        config_of(without, word)
    assert str(caught.value).startswith(f"{key} is ")
    assert needs.key in str(caught.value)
    given = [right(needs.key, value) for value in needs.values or ("",)]
    given += [f"{without} {RIGHT[other]}" for other in needs.others]
    for words in given:
        units = ""
        if key.endswith("_samples"):
            units = "train.steps=null train.samples=100 optim.wsd_steps=null"
            units += " optim.wsd_samples=2" if "style=wsd" in words else ""
        assert flat_values(config_of(words, units, word))[key] != FIELDS[key].default


def test_what_is_refused_names_the_default() -> None:
    """A preset may have set the key, which cannot be taken back then, but be given its default."""
    with pytest.raises(InputError) as caught:
        config_of("optim.decay_style=constant optim.decay_steps=8")
    assert str(caught.value) == (
        "optim.decay_steps is for optim.decay_style linear or cosine or inverse_sqrt or wsd or optim.warmup_fraction, "
        "not constant: leave it at its default null (it is 8)"
    )
    with pytest.raises(InputError) as caught:
        config_of("optim.warmup_init_lr=1e-5")
    assert str(caught.value) == (
        "optim.warmup_init_lr is 1.0e-05 without optim.warmup_steps or optim.warmup_samples or optim.warmup_fraction, "
        "to which it belongs: set that, or leave it at its default 0.0"
    )


def unchecked(config: OptimConfig, **changes: object) -> OptimConfig:
    """The configuration with values that it refuses."""
    config = copy(config)
    for key, value in changes.items():
        object.__setattr__(config, key, value)
    return config


def test_what_the_table_says_of_the_schedule() -> None:
    """The keys that a constant rate refuses change no rate of it; those that it takes do."""
    n = np.arange(0, 120, 4)
    constant = OptimConfig(lr=1e-3, decay_style="constant", warmup_fraction=0.5)
    rates = learning_rate(n, Schedule.from_config(constant, 100, 4))
    for changed, same in (({"min_lr": 1e-4}, True), ({"decay_steps": 10}, False), ({"warmup_init_lr": 1e-4}, False)):
        others = learning_rate(n, Schedule.from_config(unchecked(constant, **changed), 100, 4))
        assert np.array_equal(rates, others) == same, changed
    flat = OptimConfig(lr=1e-3, decay_style="constant")
    for ignored in ({"decay_steps": 10}, {"warmup_init_lr": 1e-4}):
        others = learning_rate(n, Schedule.from_config(unchecked(flat, **ignored), 100, 4))
        assert np.array_equal(others, learning_rate(n, Schedule.from_config(flat, 100, 4)))


FREE = {
    "tokenizer": "type model vocab merges vocab_size extra_ids bos chat_template",
    "data": "kind path train_path text text_key mock split seq_length fim_rate cache_dir prefetch",
    "optim": "name lr weight_decay clip_grad decay_style warmup_steps warmup_samples warmup_fraction",
    "loss_scale": "",
    "health": "policy spike_factor",
}
"""Keys that stand for themselves: sources and lengths are checked against one another in `config.checks`."""


@pytest.mark.parametrize("section", FREE)
def test_every_key_needs_something_or_stands_for_itself(section: str) -> None:
    governed = {key for _, key in GOVERNED} | {f"{section}.{name}" for name in FREE[section].split()}
    assert {key for key in FIELDS if key.startswith(f"{section}.")} <= governed
