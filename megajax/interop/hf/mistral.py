"""Mistral: LLaMA whose tokens see a sliding window."""

from __future__ import annotations

from typing import Any

from megajax.config.model import ModelConfig
from megajax.interop.hf.family import Family
from megajax.interop.hf.llama import DEFAULTS, TABLE, TWINS, read_shape, write_shape
from megajax.interop.hf.settings import Nullable, Settings

OWN = {
    "intermediate_size": 14336,
    "num_key_value_heads": Nullable(int, 8),
    "max_position_embeddings": 131072,
    "sliding_window": Nullable(int, 4096),
}


def read(settings: Settings) -> ModelConfig:
    """From config.json."""
    return ModelConfig(**read_shape(settings), window=settings.get("sliding_window"))


def write(model: ModelConfig) -> dict[str, Any]:
    """To config.json."""
    return {**write_shape(model), "sliding_window": model.window}


MISTRAL = Family(
    model_type="mistral",
    architecture=lambda _: "MistralForCausalLM",
    defaults=DEFAULTS | OWN,
    read=read,
    write=write,
    table=lambda _: TABLE,
    prefix="model.",
    twins=TWINS,
)
