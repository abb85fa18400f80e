"""How many numbers a model has, in closed form: no array is made.

Shapes: D embed, N heads, K kv heads, H head dim, F mlp, V vocabulary, P positions, T token types, R distance buckets,
L layers.
"""

from __future__ import annotations

from megajax.config.base import InputError
from megajax.config.model import ModelConfig


def parameter_count(model: ModelConfig, *, padded: bool = False) -> int:
    """All parameters; `padded` counts the vocabulary's padding rows too, which exist but are never used."""
    return sum(parameter_counts(model, padded=padded).values())


def parameter_counts(model: ModelConfig, *, padded: bool = False) -> dict[str, int]:
    """Parameters by kind, those of blocks summed over the L blocks; kinds the model lacks are 0 or missing.

    Raises:
        InputError: the vocabulary is not known yet.
    """
    if model.vocab_size is None:
        raise InputError("model.vocab_size is not set: the number of parameters depends on it")
    V = model.padded_vocab_size if padded else model.vocab_size
    D, P = model.hidden_size, model.position_rows
    counts = {
        "word_embedding": V * D,
        "position_embedding": P * D if model.positions == "learned" else 0,
        "embedding_norm": _norm(model, D) * model.embedding_norm,
        **_blocks(model, model.num_layers),
        "final_norm": _norm(model, D) if model.norm_placement == "pre" or model.family != "bert" else 0,
        "head": 0 if model.tied_head else V * D,
    }
    if model.family == "bert":
        counts |= _bert(model, V)
    if model.family == "t5":
        counts |= _t5(model)
    return counts


def _blocks(model: ModelConfig, L: int) -> dict[str, int]:
    """A stack of L layers."""
    D, F = model.hidden_size, model.ffn_size
    N, K, H = model.num_heads, model.kv_heads, model.head_size
    inputs = 2 if model.gated else 1
    qkv = (N + 2 * K) * H
    return {
        "attention_norm": L * _norm(model, D),
        "qkv": L * qkv * (D + model.has_qkv_bias),
        "qk_norm": L * 2 * _norm(model, H) * model.qk_norm,
        "attention_out": L * D * (N * H + model.bias),
        "mlp_norm": L * _norm(model, D),
        **(
            _mixture(model, L)
            if model.experts
            else {
                "fc1": L * inputs * F * (D + model.bias),
                "fc2": L * D * (F + model.bias),
            }
        ),
    }


def _mixture(model: ModelConfig, L: int) -> dict[str, int]:
    """The MLPs of a mixture's layers, and their routers."""
    D, E, F, shared = model.hidden_size, model.experts, model.expert_size, model.shared_ffn_size
    inputs = 2 if model.gated else 1
    return {
        "router": L * D * E,
        "fc1": L * E * D * inputs * F,
        "fc2": L * E * F * D,
        "shared": L * shared * D * (inputs + 1),
        "shared_gate": L * D * model.shared_gate,
    }


def _bert(model: ModelConfig, V: int) -> dict[str, int]:
    """What BERT has besides: token types, the head of masked tokens, and that of pairs."""
    D, classes = model.hidden_size, 2
    return {
        "head": 0,
        "token_type_embedding": model.token_types * D,
        "transform": D * (D + 1),
        "transform_norm": _norm(model, D),
        "head_bias": V,
        "pooler": D * (D + 1) * model.pair_task,
        "pair_head": (D + 1) * classes * model.pair_task,
    }


def _t5(model: ModelConfig) -> dict[str, int]:
    """What T5 has besides: the encoder, the decoder's attention to it, and a bias table for each."""
    L, D, N, H = model.num_layers, model.hidden_size, model.num_heads, model.head_size
    encoder = _blocks(model, model.encoder_layers or L)
    return {
        **{f"encoder_{kind}": count for kind, count in encoder.items()},
        "encoder_norm": _norm(model, D),
        "cross_norm": L * _norm(model, D),
        "cross": L * 4 * D * N * H,
        "relative_bias": 2 * model.relative_buckets * N,
    }


def _norm(model: ModelConfig, size: int) -> int:
    """Scale, and for LayerNorm shift."""
    return size * (2 if model.norm == "layernorm" else 1)
