"""Hugging Face models made without transformers: random tensors with a family's names and shapes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from megajax.config import ModelConfig
from megajax.interop.hf.families import FAMILIES
from megajax.interop.hf.tensors import Moves

DECODER: dict[str, Any] = {
    "num_layers": 2, "hidden_size": 16, "num_heads": 4, "max_positions": 32, "vocab_size": 50, "ffn_hidden_size": 24,
}  # fmt: skip
GROUPED = DECODER | {
    "num_kv_heads": 2, "positions": "rope", "norm": "rmsnorm", "activation": "swiglu", "bias": False,
    "tied_head": False,
}  # fmt: skip
GEMMA = GROUPED | {
    "activation": "geglu", "tied_head": True, "head_dim": 8, "window": 4, "norm_plus_one": True, "branch_norm": True,
    "embedding_scale": True,
}  # fmt: skip
MIXTURE = GROUPED | {"experts": 4, "experts_per_token": 2, "balance_loss": 0.01}
ENCODER = DECODER | {"family": "bert", "activation": "gelu_exact", "token_types": 2}
POST = {"norm_placement": "post", "embedding_norm": True}
T5 = GROUPED | {"family": "t5", "num_kv_heads": None, "positions": "relative", "attention_scale": 1.0, "head_dim": 8}
MODELS = {
    "gpt2": ModelConfig(**DECODER),
    "llama": ModelConfig(**GROUPED, rope_base=5e5, rope_scaling_factor=8.0, rope_original_positions=16),
    "mistral": ModelConfig(**GROUPED, window=4),
    "starcoder2": ModelConfig(**DECODER, num_kv_heads=2, positions="rope", window=4),
    "nemotron": ModelConfig(
        **GROUPED | {"norm": "layernorm", "activation": "squared_relu"}, norm_plus_one=True, rope_fraction=0.5
    ),
    "qwen2": ModelConfig(**GROUPED, qkv_bias=True),
    "qwen3": ModelConfig(**GROUPED, qk_norm=True, head_dim=8),
    "mixtral": ModelConfig(**MIXTURE),
    "qwen2_moe": ModelConfig(
        **MIXTURE, qkv_bias=True, expert_ffn_size=12, shared_ffn_size=20, shared_gate=True, router_renormalize=False
    ),
    "qwen3_moe": ModelConfig(**MIXTURE, qk_norm=True, expert_ffn_size=12),
    "gemma2": ModelConfig(**GEMMA, layer_pattern=("local", "global"), attention_softcap=50.0, logit_softcap=30.0),
    "gemma3_text": ModelConfig(
        **GEMMA, layer_pattern=("local", "global"), rope_local_base=100.0, qk_norm=True, attention_scale=0.5
    ),
    "bloom": ModelConfig(**DECODER | {"ffn_hidden_size": None, "positions": "alibi", "embedding_norm": True}),
    "bert": ModelConfig(**ENCODER, **POST, pair_task=True),
    "megatron-bert": ModelConfig(**ENCODER, pair_task=True),
    "roberta": ModelConfig(**ENCODER | {"token_types": 1, "position_offset": 2, **POST}),
    "t5": ModelConfig(**T5 | {"activation": "relu", "tied_head": True, "encoder_layers": 1}),
}
"""A model that only its family has, or that is enough to tell it from those before it."""


def tensors(model_type: str, model: ModelConfig, dtype: Any = np.float32) -> dict[str, np.ndarray]:
    """Random numbers that survive the dtype."""
    rng = np.random.default_rng(0)
    shapes = Moves(FAMILIES[model_type], model).tensors()
    return {name: rng.standard_normal(shape, np.float32).astype(dtype) for name, shape in shapes}


def made(directory: Path, model_type: str = "gpt2", model: ModelConfig | None = None, dtype: Any = np.float32) -> Path:
    """A model's directory with one file of tensors."""
    family, model = FAMILIES[model_type], model or MODELS[model_type]
    directory.mkdir(parents=True)
    settings = {"architectures": [family.architecture(model)], "model_type": model_type, **family.write(model)}
    (directory / "config.json").write_text(json.dumps(settings | {"torch_dtype": str(np.dtype(dtype))}))
    save_file(tensors(model_type, model, dtype), directory / "model.safetensors", {"format": "pt"})
    return directory


def change(directory: Path, **settings: Any) -> None:
    """Other values in config.json."""
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | settings))
