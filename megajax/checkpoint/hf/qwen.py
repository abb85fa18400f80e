"""Qwen 2, whose queries, keys and values have biases, and Qwen 3, whose queries and keys have norms instead."""

from __future__ import annotations

from typing import Any

from megajax.checkpoint.hf.family import Family
from megajax.checkpoint.hf.llama import TABLE, TWINS, read_shape, write_shape
from megajax.checkpoint.hf.settings import Settings
from megajax.config.model import ModelConfig


def read_window(settings: Settings) -> int | None:
    """The sliding window, which all layers have or none."""
    if not settings.get("use_sliding_window", False):
        return None
    layers = settings["num_hidden_layers"]
    if "layer_types" in settings.values:
        settings.only("layer_types", ["sliding_attention"] * layers, ["full_attention"] * layers)
        return settings["sliding_window"] if settings["layer_types"][0] == "sliding_attention" else None
    first = settings["max_window_layers"]
    settings.only("max_window_layers", 0, max(first, layers))
    return settings["sliding_window"] if first == 0 else None


def write_window(model: ModelConfig) -> dict[str, Any]:
    """The inverse of `read_window`."""
    if model.window is None:
        return {"use_sliding_window": False, "sliding_window": None}
    return {"use_sliding_window": True, "sliding_window": model.window, "max_window_layers": 0}


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
    read=read_qwen2,
    write=write,
    table=lambda _: TABLE,
    prefix="model.",
    twins=TWINS,
)
QWEN3 = Family(
    model_type="qwen3",
    architecture=lambda _: "Qwen3ForCausalLM",
    read=read_qwen3,
    write=write,
    table=lambda _: TABLE,
    prefix="model.",
    twins=TWINS,
)
