"""Names and layouts of Megatron-LM's weights, of all its ages, against ours.

Weights are stored [out, in]. Rows of linear_qkv go by query group: its queries, its key, its value (since
checkpoint_version 2; older ones are brought into that order). Of a gated MLP, the whole tensor is [gate; up].

Shapes: D embed, N heads, K groups, G queries of one, H head dim, F mlp, A = 2 if gated, else 1, V vocabulary.
"""

from __future__ import annotations

import re
from collections.abc import Callable

import numpy as np

from megajax.config.model import ModelConfig

IGNORED = re.compile(r"_extra_state|inv_freq|word_embeddings_for_head|\.masked_bias|\.attn\.bias")
"""State of the runtime, and the copy of a tied table that the last stage held."""
RENAMED = (
    (r"^(module\.)*(language_model\.)?", ""),
    (r"^(encoder|transformer)\.", "decoder."),
    (r"^(decoder\.)?final_(norm|layernorm)\.", "decoder.final_layernorm."),
    (r"\.(input_norm|input_layernorm)\.", ".input_layernorm."),
    (r"\.(post_attention_norm|post_attention_layernorm)\.", ".pre_mlp_layernorm."),
    (r"\.(self_attention|attention)\.query_key_value\.", ".self_attention.linear_qkv."),
    (r"\.(self_attention|attention)\.dense\.", ".self_attention.linear_proj."),
    (r"\.mlp\.dense_h_to_4h\.", ".mlp.linear_fc1."),
    (r"\.mlp\.dense_4h_to_h\.", ".mlp.linear_fc2."),
    (r"\.self_attention\.linear_qkv\.layer_norm_", ".input_layernorm."),
    (r"\.mlp\.linear_fc1\.layer_norm_", ".pre_mlp_layernorm."),
)
"""Names of older versions, and of norms that are fused into the layer behind them, to those of Megatron core."""

Change = Callable[[np.ndarray, ModelConfig], np.ndarray]


def canonical(name: str) -> str | None:
    """The name in Megatron core; None for what is no weight."""
    if IGNORED.search(name):
        return None
    for pattern, better in RENAMED:
        name = re.sub(pattern, better, name)
    return name


def _as_it_is(x: np.ndarray, c: ModelConfig) -> np.ndarray:
    return x


def _qkv(x: np.ndarray, c: ModelConfig) -> np.ndarray:
    """[K (G + 2) H, D] -> [D, K, G + 2, H]."""
    rows = (c.kv_heads, c.num_heads // c.kv_heads + 2, c.head_size)
    return np.moveaxis(x.reshape(*rows, c.hidden_size), -1, 0)


def _qkv_bias(x: np.ndarray, c: ModelConfig) -> np.ndarray:
    return x.reshape(c.kv_heads, c.num_heads // c.kv_heads + 2, c.head_size)


def _out(x: np.ndarray, c: ModelConfig) -> np.ndarray:
    """[D, N H] -> [N, H, D]."""
    return x.T.reshape(c.num_heads, c.head_size, c.hidden_size)


def _fc1(x: np.ndarray, c: ModelConfig) -> np.ndarray:
    """[A F, D] -> [D, A, F]."""
    return np.moveaxis(x.reshape(-1, c.ffn_size, c.hidden_size), -1, 0)


def _fc1_bias(x: np.ndarray, c: ModelConfig) -> np.ndarray:
    return x.reshape(-1, c.ffn_size)


def _transposed(x: np.ndarray, c: ModelConfig) -> np.ndarray:
    return x.T


def _vocabulary(x: np.ndarray, c: ModelConfig) -> np.ndarray:
    """Rows that count."""
    return x[: c.vocab_size]


WHOLE: dict[str, tuple[str, Change]] = {
    "embedding.word_embeddings.weight": ("word_embedding", _vocabulary),
    "embedding.position_embeddings.weight": ("position_embedding", _as_it_is),
    "decoder.final_layernorm.weight": ("final_norm.scale", _as_it_is),
    "decoder.final_layernorm.bias": ("final_norm.bias", _as_it_is),
    "output_layer.weight": ("head", _vocabulary),
}
"""Weights of the model, ours and how they become ours."""
LAYER: dict[str, tuple[str, Change]] = {
    "input_layernorm.weight": ("attention_norm.scale", _as_it_is),
    "input_layernorm.bias": ("attention_norm.bias", _as_it_is),
    "self_attention.linear_qkv.weight": ("attention.qkv", _qkv),
    "self_attention.linear_qkv.bias": ("attention.qkv_bias", _qkv_bias),
    "self_attention.linear_proj.weight": ("attention.out", _out),
    "self_attention.linear_proj.bias": ("attention.out_bias", _as_it_is),
    "self_attention.q_layernorm.weight": ("attention.q_norm.scale", _as_it_is),
    "self_attention.q_layernorm.bias": ("attention.q_norm.bias", _as_it_is),
    "self_attention.k_layernorm.weight": ("attention.k_norm.scale", _as_it_is),
    "self_attention.k_layernorm.bias": ("attention.k_norm.bias", _as_it_is),
    "pre_mlp_layernorm.weight": ("mlp_norm.scale", _as_it_is),
    "pre_mlp_layernorm.bias": ("mlp_norm.bias", _as_it_is),
    "mlp.linear_fc1.weight": ("mlp.fc1", _fc1),
    "mlp.linear_fc1.bias": ("mlp.fc1_bias", _fc1_bias),
    "mlp.linear_fc2.weight": ("mlp.fc2", _transposed),
    "mlp.linear_fc2.bias": ("mlp.fc2_bias", _as_it_is),
}
"""Weights of a layer."""
