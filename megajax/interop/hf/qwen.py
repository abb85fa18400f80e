"""Qwen 2, whose queries, keys and values have biases, and Qwen 3, whose queries and keys have norms instead."""

from __future__ import annotations

from typing import Any

from megajax.config.model import ModelConfig
from megajax.interop.hf.family import Family
from megajax.interop.hf.llama import DEFAULTS, TABLE, TWINS, read_shape, write_shape
from megajax.interop.hf.settings import Nullable, Settings

WINDOW = {
    "use_sliding_window": False,
    "sliding_window": Nullable(int, 4096),
    "max_window_layers": 28,
    "layer_types": Nullable(list),
}
SIZES = {
    "vocab_size": 151936,
    "intermediate_size": 22016,
    "num_key_value_heads": Nullable(int, 32),
    "max_position_embeddings": 32768,
}


def read_window(settings: Settings, first_layers: bool = False) -> int | None:
    """The sliding window, which all layers have or none.

    Args:
        settings: of the model.
        first_layers: `max_window_layers` counts every other one of the first layers, instead of leaving them out.
    """
    layers, count = settings["num_hidden_layers"], settings["max_window_layers"]
    windowed = settings["use_sliding_window"] and settings.get("sliding_window") is not None
    kinds = settings.get("layer_types")
    if kinds is not None:
        kind = kinds[0] if kinds else ""
        known = ("full_attention", "sliding_attention") if windowed else ("full_attention",)
        if kind not in known or len(kinds) != layers or any(other != kind for other in kinds):
            settings.refuse("layer_types", f"{' or '.join(known)} for all of {layers} layers")
        return settings["sliding_window"] if kind == "sliding_attention" else None
    none, every = (count <= 0, layers == 1) if first_layers else (count >= layers, count <= 0)
    if windowed and not none and not every:
        settings.refuse("max_window_layers", "one window for all layers, or none")
    return settings["sliding_window"] if windowed and every and not none else None


def write_window(model: ModelConfig) -> dict[str, Any]:
    """The inverse of `read_window`, the kind of every layer spelled out: what is meant otherwise differs by version."""
    kind = "full_attention" if model.window is None else "sliding_attention"
    return {
        "use_sliding_window": model.window is not None,
        "sliding_window": model.window,
        "max_window_layers": model.num_layers if model.window is None else 0,
        "layer_types": [kind] * model.num_layers,
    }


def read_qwen2(settings: Settings) -> ModelConfig:
    """From config.json."""
    return ModelConfig(**read_shape(settings), qkv_bias=True, window=read_window(settings))


def read_qwen3(settings: Settings) -> ModelConfig:
    """From config.json."""
    settings.only("attention_bias", False)
    return ModelConfig(**read_shape(settings), qk_norm=True, window=read_window(settings))


def write(model: ModelConfig) -> dict[str, Any]:
    """To config.json."""
    return {**write_shape(model), **write_window(model)}


QWEN2 = Family(
    model_type="qwen2",
    architecture=lambda _: "Qwen2ForCausalLM",
    defaults=DEFAULTS | WINDOW | SIZES,
    read=read_qwen2,
    write=write,
    table=lambda _: TABLE,
    prefix="model.",
    twins=TWINS,
)
QWEN3 = Family(
    model_type="qwen3",
    architecture=lambda _: "Qwen3ForCausalLM",
    defaults=DEFAULTS | WINDOW | SIZES | {"head_dim": 128},
    read=read_qwen3,
    write=write,
    table=lambda _: TABLE,
    prefix="model.",
    twins=TWINS,
)
