"""How many numbers a model has, in closed form: no array is made.

Shapes: D embed, N heads, K kv heads, H head dim, F mlp, V vocabulary, P positions, L layers.
"""

from __future__ import annotations

from megajax.config.base import ConfigError
from megajax.config.model import ModelConfig


def parameter_count(model: ModelConfig, *, padded: bool = False) -> int:
    """All parameters; `padded` counts the vocabulary's padding rows too, which exist but are never used."""
    return sum(parameter_counts(model, padded=padded).values())


def parameter_counts(model: ModelConfig, *, padded: bool = False) -> dict[str, int]:
    """Parameters by kind, those of blocks summed over the L blocks; kinds the model lacks are 0.

    Raises:
        ConfigError: the vocabulary is not known yet.
    """
    if model.vocab_size is None:
        raise ConfigError("model.vocab_size is not set: the number of parameters depends on it")
    V = model.padded_vocab_size if padded else model.vocab_size
    L, D, F = model.num_layers, model.hidden_size, model.ffn_size
    N, K, H = model.num_heads, model.kv_heads, model.head_size
    inputs = 2 if model.activation == "swiglu" else 1
    norm = 2 if model.norm == "layernorm" else 1  # scale, and for LayerNorm shift
    qkv = (N + 2 * K) * H
    return {
        "word_embedding": V * D,
        "position_embedding": model.max_positions * D if model.positions == "learned" else 0,
        "attention_norm": L * norm * D,
        "qkv": L * qkv * (D + model.has_qkv_bias),
        "qk_norm": L * 2 * norm * H * model.qk_norm,
        "attention_out": L * D * (N * H + model.bias),
        "mlp_norm": L * norm * D,
        "fc1": L * inputs * F * (D + model.bias),
        "fc2": L * D * (F + model.bias),
        "final_norm": norm * D,
        "head": 0 if model.tied_head else V * D,
    }
