"""Names and layouts of Megatron-LM's weights, of all its ages, against ours.

Weights are stored [out, in]. Rows of linear_qkv go by query group: its queries, its key, its value (since
checkpoint_version 2; older ones are brought into that order). Of a gated MLP, the whole tensor is [gate; up].

Shapes: E experts, D embed, N heads, K groups, G queries of one, H head dim, F mlp, A = 2 if gated, else 1, V
vocabulary.
"""

from __future__ import annotations

import re
from collections.abc import Callable

import numpy as np

from megajax.interop.megatron.arguments import Architecture

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
    (r"^lm_head\.(norm|layernorm)\.", "lm_head.layer_norm."),
    (r"^lm_head\.bias$", "output_layer.bias"),
    (r"\.mlp\.experts\.local_experts\.", ".mlp.experts."),
    (r"\.mlp\.experts\.(linear_fc\d)\.weight(\d+)$", r".mlp.experts.\2.\1.weight"),
    (r"\.mlp\.experts\.experts\.", ".mlp.experts."),
)
"""Names of older versions, of norms that are fused into the layer behind them, and of experts in all their containers,
to those of Megatron core; one expert is mlp.experts.0.linear_fc1.weight, all of them are mlp.experts.linear_fc1.weight.
"""
ONE_EXPERT = re.compile(r"(?<=mlp\.experts\.)(\d+)\.")

Change = Callable[[np.ndarray, Architecture], np.ndarray]


def canonical(name: str) -> str | None:
    """The name in Megatron core; None for what is no weight."""
    if IGNORED.search(name):
        return None
    for pattern, better in RENAMED:
        name = re.sub(pattern, better, name)
    return name


def _as_it_is(x: np.ndarray, a: Architecture) -> np.ndarray:
    return x


def _gain(x: np.ndarray, a: Architecture) -> np.ndarray:
    return x + np.float32(1) if a.zero_centered else x


def _head_gain(x: np.ndarray, a: Architecture) -> np.ndarray:
    """[H] of a norm of queries or keys, in the order of their dims."""
    return _halves(_gain(x, a), a)


def _halves(x: np.ndarray, a: Architecture) -> np.ndarray:
    """[..., H] whose rotary pairs are neighbours, with the first of each pair in the first half of what is rotated."""
    if not a.interleaved:
        return x
    rotated = int(a.model.head_size * a.model.rope_fraction)
    order = [*range(0, rotated, 2), *range(1, rotated, 2), *range(rotated, a.model.head_size)]
    return x[..., order]


def _qkv(x: np.ndarray, a: Architecture) -> np.ndarray:
    """[K (G + 2) H, D] -> [D, K, G + 2, H]."""
    return _qkv_bias(x.T, a)


def _qkv_bias(x: np.ndarray, a: Architecture) -> np.ndarray:
    """[..., K (G + 2) H] -> [..., K, G + 2, H]."""
    c = a.model
    x = x.reshape(*x.shape[:-1], c.kv_heads, c.num_heads // c.kv_heads + 2, c.head_size)
    return np.concatenate([_halves(x[..., :-1, :], a), x[..., -1:, :]], axis=-2)


def _out(x: np.ndarray, a: Architecture) -> np.ndarray:
    """[D, N H] -> [N, H, D]."""
    return x.T.reshape(a.model.num_heads, a.model.head_size, a.model.hidden_size)


def _fc1(x: np.ndarray, a: Architecture) -> np.ndarray:
    """[..., A F, D] -> [..., D, A, F]."""
    return _fc1_bias(np.swapaxes(x, -1, -2), a)


def _fc1_bias(x: np.ndarray, a: Architecture) -> np.ndarray:
    """[..., A F] -> [..., A, F]."""
    return x.reshape(*x.shape[:-1], 2 if a.model.gated else 1, -1)


def _transposed(x: np.ndarray, a: Architecture) -> np.ndarray:
    return np.swapaxes(x, -1, -2)


def _row(x: np.ndarray, a: Architecture) -> np.ndarray:
    return x[0]


def _vocabulary(x: np.ndarray, a: Architecture) -> np.ndarray:
    """Rows that count."""
    return x[: a.model.vocab_size]


WHOLE: dict[str, tuple[str, Change]] = {
    "embedding.word_embeddings.weight": ("word_embedding", _vocabulary),
    "embedding.position_embeddings.weight": ("position_embedding", _as_it_is),
    "decoder.final_layernorm.weight": ("final_norm.scale", _gain),
    "decoder.final_layernorm.bias": ("final_norm.bias", _as_it_is),
    "output_layer.weight": ("head", _vocabulary),
    "embedding.tokentype_embeddings.weight": ("token_type_embedding", _as_it_is),
    "lm_head.dense.weight": ("transform", _transposed),
    "lm_head.dense.bias": ("transform_bias", _as_it_is),
    "lm_head.layer_norm.weight": ("transform_norm.scale", _gain),
    "lm_head.layer_norm.bias": ("transform_norm.bias", _as_it_is),
    "output_layer.bias": ("head_bias", _vocabulary),
    "pooler.dense.weight": ("pooler", _transposed),
    "pooler.dense.bias": ("pooler_bias", _as_it_is),
    "binary_head.weight": ("pair_head", _transposed),
    "binary_head.bias": ("pair_bias", _as_it_is),
}
"""Weights of the model, ours and how they become ours."""
LAYER: dict[str, tuple[str, Change]] = {
    "input_layernorm.weight": ("attention_norm.scale", _gain),
    "input_layernorm.bias": ("attention_norm.bias", _as_it_is),
    "self_attention.linear_qkv.weight": ("attention.qkv", _qkv),
    "self_attention.linear_qkv.bias": ("attention.qkv_bias", _qkv_bias),
    "self_attention.linear_proj.weight": ("attention.out", _out),
    "self_attention.linear_proj.bias": ("attention.out_bias", _as_it_is),
    "self_attention.q_layernorm.weight": ("attention.q_norm.scale", _head_gain),
    "self_attention.q_layernorm.bias": ("attention.q_norm.bias", _halves),
    "self_attention.k_layernorm.weight": ("attention.k_norm.scale", _head_gain),
    "self_attention.k_layernorm.bias": ("attention.k_norm.bias", _halves),
    "pre_mlp_layernorm.weight": ("mlp_norm.scale", _gain),
    "pre_mlp_layernorm.bias": ("mlp_norm.bias", _as_it_is),
    "mlp.linear_fc1.weight": ("mlp.fc1", _fc1),
    "mlp.linear_fc1.bias": ("mlp.fc1_bias", _fc1_bias),
    "mlp.linear_fc2.weight": ("mlp.fc2", _transposed),
    "mlp.linear_fc2.bias": ("mlp.fc2_bias", _as_it_is),
    "mlp.router.weight": ("mlp.router", _transposed),
    "mlp.experts.linear_fc1.weight": ("mlp.fc1", _fc1),
    "mlp.experts.linear_fc2.weight": ("mlp.fc2", _transposed),
    "mlp.shared_experts.linear_fc1.weight": ("mlp.shared.fc1", _fc1),
    "mlp.shared_experts.linear_fc2.weight": ("mlp.shared.fc2", _transposed),
    "mlp.shared_experts.gate_weight": ("mlp.shared_gate", _row),
}
"""Weights of a layer."""
