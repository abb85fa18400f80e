"""Families of Gemma 2 and 3, with a pattern of layers, norms around every branch, and in Gemma 3 two rotary bases."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megajax.config.model import ModelConfig
from megajax.interop.hf.decoders import LLAMA_LAYER, LLAMA_TABLE, ROPE, ROPE_KEYS, SIZES, llama_like, write_rope
from megajax.interop.hf.family import Nullable, Row, Rows, Settings, always, field, only, with_defaults
from megajax.interop.patterns import Table

LONGEST = 100
"""Largest number of layers in a pattern that a number may name; in a longer one each layer has to be listed."""
_LAYER_TYPES = {"sliding_attention": "local", "full_attention": "global"}


def _read_pattern(settings: Settings, period: int) -> Mapping[str, Any]:
    """Read the window, and the shortest pattern that the layers repeat, which is empty where all are alike.

    Where the kinds of layers are not listed, the last one of every `period` is global.
    """
    layers, types = settings["num_hidden_layers"], settings.get("layer_types")
    if types is None:
        pattern = ["local"] if layers < period else [*["local"] * (period - 1), "global"]
    elif not types or len(types) != layers or any(kind not in [*_LAYER_TYPES] for kind in types):
        settings.refuse("layer_types", f"{' or '.join(_LAYER_TYPES)} for each of {layers} layers")
    else:
        kinds = [_LAYER_TYPES[kind] for kind in types]
        lengths = range(1, len(kinds) + 1)
        pattern = next(kinds[:n] for n in lengths if all(kind == kinds[i % n] for i, kind in enumerate(kinds)))
    return {
        "window": settings["sliding_window"] if "local" in pattern else None,
        "layer_pattern": tuple(pattern) if len(pattern) > 1 else (),
    }


def _write_pattern(model: ModelConfig) -> Mapping[str, Any]:
    names = {kind: name for name, kind in _LAYER_TYPES.items()}
    return {"sliding_window": model.window, "layer_types": [names[kind] for kind in model.layer_kinds]}


_PATTERN_KEYS = {"sliding_window": Nullable(int, 4096), "layer_types": Nullable(list)}


def _read_scale(settings: Settings) -> Mapping[str, Any]:
    scalar = settings["query_pre_attn_scalar"]
    if scalar < 1:
        settings.refuse("query_pre_attn_scalar", "numbers from 1 on")
    return {"attention_scale": None if scalar == settings.get("head_dim") else scalar**-0.5}


_SCALE = Row(
    {"query_pre_attn_scalar": 256},
    _read_scale,
    lambda model: {
        "query_pre_attn_scalar": round(min(2**31, 1 / model.attention_scale / model.attention_scale))
        if model.attention_scale
        else model.head_size
    },
)
_GEMMA: Rows = (
    always(activation="geglu", norm_plus_one=True, branch_norm=True, embedding_scale=True),
    only("hidden_activation", "gelu_pytorch_tanh", written=True),
    only("attention_bias", False),
    only("use_bidirectional_attention", None, False, default=Nullable(bool)),
    *with_defaults(
        SIZES,
        num_hidden_layers=26,
        hidden_size=2304,
        num_attention_heads=8,
        num_key_value_heads=Nullable(int, 4),
        head_dim=Nullable(int, 256),
        intermediate_size=9216,
        max_position_embeddings=8192,
        vocab_size=256_000,
        tie_word_embeddings=True,
    ),
    _SCALE,
)
GEMMA_TABLE: Table = {
    **LLAMA_TABLE,
    "blocks.attention_branch_norm.scale": {f"{LLAMA_LAYER}.post_attention_layernorm.weight": "D -> D"},
    "blocks.mlp_norm.scale": {f"{LLAMA_LAYER}.pre_feedforward_layernorm.weight": "D -> D"},
    "blocks.mlp_branch_norm.scale": {f"{LLAMA_LAYER}.post_feedforward_layernorm.weight": "D -> D"},
}
GEMMA2 = llama_like(
    "gemma2",
    "Gemma2ForCausalLM",
    (
        *_GEMMA,
        ROPE,
        Row(_PATTERN_KEYS, lambda settings: _read_pattern(settings, 2), _write_pattern),
        field("attn_logit_softcapping", "attention_softcap", Nullable(float, 50.0)),
        field("final_logit_softcapping", "logit_softcap", Nullable(float, 30.0)),
    ),
    GEMMA_TABLE,
)


def _read_two_bases(settings: Settings) -> Mapping[str, Any]:
    """Read window, pattern and the rotary embedding of both kinds of layers; that of local ones is never scaled."""
    period = settings["sliding_window_pattern"]
    if not 1 <= period <= LONGEST:
        settings.refuse("sliding_window_pattern", f"1 to {LONGEST}")
    pattern = _read_pattern(settings, period)
    settings.only("rope_scaling", None)
    newer = Settings(
        settings.get("rope_parameters") or {}, dict.fromkeys(_LAYER_TYPES, Nullable(dict)), within="rope_parameters."
    )
    if unknown := newer.values.keys() - _LAYER_TYPES.keys():
        settings.refuse("rope_parameters", f"no {sorted(unknown)[0]} there")
    bases = {}
    for name, older in (("full_attention", "rope_theta"), ("sliding_attention", "rope_local_base_freq")):
        rope = Settings(newer.get(name) or {}, ROPE_KEYS, within=f"rope_parameters.{name}.")
        if unknown := rope.values.keys() - ROPE_KEYS.keys():
            settings.refuse("rope_parameters", f"no {sorted(unknown)[0]} there")
        rope.only("rope_type", None, "default")
        rope.only("partial_rotary_factor", None, 1.0)
        bases[_LAYER_TYPES[name]] = rope.get("rope_theta") or settings[older]
    if pattern["layer_pattern"]:
        local = bases["local"] if bases["local"] != bases["global"] else None
        return {**pattern, "rope_base": bases["global"], "rope_local_base": local}
    return {**pattern, "rope_base": bases["global" if pattern["window"] is None else "local"]}


_TWO_BASES = Row(
    {
        **_PATTERN_KEYS,
        "sliding_window_pattern": 6,
        "rope_theta": 1_000_000.0,
        "rope_local_base_freq": 10_000.0,
        "rope_scaling": Nullable(dict),
        "rope_parameters": Nullable(dict),
    },
    _read_two_bases,
    lambda model: {
        **_write_pattern(model),
        **write_rope(model),
        "rope_local_base_freq": (model.layer_pattern and model.rope_local_base) or model.rope_base,
    },
    forms=("rope_parameters",),
)
GEMMA3 = llama_like(
    "gemma3_text",
    "Gemma3ForCausalLM",
    (
        *with_defaults(_GEMMA, max_position_embeddings=131_072, vocab_size=262_208),
        _TWO_BASES,
        only("attn_logit_softcapping", None, default=Nullable(float)),  # transformers reads it, and caps nothing
        field("final_logit_softcapping", "logit_softcap", Nullable(float)),
        always(qk_norm=True),
    ),
    GEMMA_TABLE,
)
