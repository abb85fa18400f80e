"""LLaMA 2, 3 and 3.1, and models of the same form, such as SmolLM.

The table serves Mistral and Qwen as well, which have the same names for what they have.
"""

from __future__ import annotations

from typing import Any

from megajax.config.model import ModelConfig
from megajax.interop.hf.family import Family, Table
from megajax.interop.hf.settings import Nullable, Settings

LAYER = "model.layers.{layer}"
ATTENTION = f"{LAYER}.self_attn"
MLP = f"{LAYER}.mlp"
WITHOUT_MLP: Table = {
    "word_embedding": {"model.embed_tokens.weight": "V D -> V D"},
    "blocks.attention_norm.scale": {f"{LAYER}.input_layernorm.weight": "D -> D"},
    "blocks.attention.qkv": {
        f"{ATTENTION}.q_proj.weight": "(K G H) D -> D K G H",
        f"{ATTENTION}.k_proj.weight": "(K H) D -> D K 1 H",
        f"{ATTENTION}.v_proj.weight": "(K H) D -> D K 1 H",
    },
    "blocks.attention.qkv_bias": {
        f"{ATTENTION}.q_proj.bias": "(K G H) -> K G H",
        f"{ATTENTION}.k_proj.bias": "(K H) -> K 1 H",
        f"{ATTENTION}.v_proj.bias": "(K H) -> K 1 H",
    },
    "blocks.attention.q_norm.scale": {f"{ATTENTION}.q_norm.weight": "H -> H"},
    "blocks.attention.k_norm.scale": {f"{ATTENTION}.k_norm.weight": "H -> H"},
    "blocks.attention.out": {f"{ATTENTION}.o_proj.weight": "D (N H) -> N H D"},
    "blocks.attention.out_bias": {f"{ATTENTION}.o_proj.bias": "D -> D"},
    "blocks.mlp_norm.scale": {f"{LAYER}.post_attention_layernorm.weight": "D -> D"},
    "final_norm.scale": {"model.norm.weight": "D -> D"},
    "head": {"lm_head.weight": "V D -> V D"},
}
TABLE: Table = {
    **WITHOUT_MLP,
    "blocks.mlp.fc1": {f"{MLP}.gate_proj.weight": "F D -> D 1 F", f"{MLP}.up_proj.weight": "F D -> D 1 F"},
    "blocks.mlp.fc1_bias": {f"{MLP}.gate_proj.bias": "F -> 1 F", f"{MLP}.up_proj.bias": "F -> 1 F"},
    "blocks.mlp.fc2": {f"{MLP}.down_proj.weight": "D F -> F D"},
    "blocks.mlp.fc2_bias": {f"{MLP}.down_proj.bias": "D -> D"},
}
TWINS = {"lm_head.weight": "model.embed_tokens.weight"}


def interleaved(table: Table) -> Table:
    """For weights whose rotary embedding turns neighbours (2 i, 2 i + 1), as LLaMA's first release has them, instead of
    (i, i + H / 2): the even rows of every query and key head come first.
    """

    def turned(name: str, pattern: str) -> str:
        if ".q_proj." not in name and ".k_proj." not in name:
            return pattern
        left, right = pattern.split("->")
        return f"{left.replace('H', 'R 2')}->{right.replace('H', '(2 R)')}"

    return {ours: {name: turned(name, pattern) for name, pattern in row.items()} for ours, row in table.items()}


DEFAULTS = {
    "vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32,
    "num_attention_heads": 32, "num_key_value_heads": Nullable(int), "head_dim": Nullable(int), "hidden_act": "silu",
    "max_position_embeddings": 2048, "initializer_range": 0.02, "rms_norm_eps": 1e-6, "attention_dropout": 0.0,
    "tie_word_embeddings": False, "attention_bias": False, "mlp_bias": False,
    "rope_theta": 10_000.0, "rope_scaling": Nullable(dict), "rope_parameters": Nullable(dict),
    "partial_rotary_factor": Nullable(float), "original_max_position_embeddings": Nullable(int),
}  # fmt: skip
"""LLaMA's, and what its relatives say of the same keys besides."""
ROPE = {
    "rope_type": Nullable(str), "type": Nullable(str), "rope_theta": Nullable(float), "factor": Nullable(float),
    "low_freq_factor": Nullable(float), "high_freq_factor": Nullable(float),
    "original_max_position_embeddings": Nullable(int), "partial_rotary_factor": Nullable(float),
}  # fmt: skip


def read_shape(settings: Settings) -> dict[str, Any]:
    """What LLaMA and its relatives have in common, as fields of a `ModelConfig`."""
    settings.only("hidden_act", "silu")
    return {
        "num_layers": settings["num_hidden_layers"],
        "hidden_size": settings["hidden_size"],
        "num_heads": settings["num_attention_heads"],
        "num_kv_heads": settings.get("num_key_value_heads"),
        "head_dim": settings.get("head_dim"),
        "ffn_hidden_size": settings["intermediate_size"],
        "max_positions": settings["max_position_embeddings"],
        "vocab_size": settings["vocab_size"],
        "positions": "rope",
        **_read_rope(settings),
        "norm": "rmsnorm",
        "norm_eps": settings["rms_norm_eps"],
        "activation": "swiglu",
        "bias": False,
        "tied_head": settings["tie_word_embeddings"],
        "attention_dropout": settings["attention_dropout"],
        "init_std": settings["initializer_range"],
    }


def write_shape(model: ModelConfig) -> dict[str, Any]:
    """The inverse of `read_shape`."""
    return {
        "num_hidden_layers": model.num_layers,
        "hidden_size": model.hidden_size,
        "num_attention_heads": model.num_heads,
        "num_key_value_heads": model.kv_heads,
        "head_dim": model.head_size,
        "intermediate_size": model.ffn_size,
        "max_position_embeddings": model.max_positions,
        "vocab_size": model.vocab_size,
        "hidden_act": "silu",
        **_write_rope(model),
        "rms_norm_eps": model.norm_eps,
        "tie_word_embeddings": model.tied_head,
        "attention_dropout": model.attention_dropout,
        "initializer_range": model.init_std,
    }


def _read_rope(settings: Settings) -> dict[str, Any]:
    """`rope_parameters` is the newer form of `rope_theta` and `rope_scaling`, of which the older one counts."""
    key = "rope_scaling" if settings.get("rope_scaling") else "rope_parameters"
    rope = Settings(settings.get(key) or {}, ROPE, within=f"{key}.")
    if unknown := rope.values.keys() - ROPE.keys():
        settings.refuse(key, f"no {sorted(unknown)[0]} there")
    for where in (settings, rope):
        where.only("partial_rotary_factor", None, 1.0)
    base = rope.get("rope_theta") or settings["rope_theta"]
    match rope.get("rope_type") or rope.get("type") or "default":
        case "default":
            return {"rope_base": base}
        case "llama3":
            return {
                "rope_base": base,
                "rope_scaling_factor": rope["factor"],
                "rope_low_frequency": rope["low_freq_factor"],
                "rope_high_frequency": rope["high_freq_factor"],
                "rope_original_positions": settings.get("original_max_position_embeddings")
                or rope.get("original_max_position_embeddings")
                or settings["max_position_embeddings"],
            }
        case _:
            settings.refuse(key, "rope_type default and llama3")
            raise AssertionError


def _write_rope(model: ModelConfig) -> dict[str, Any]:
    if model.rope_scaling_factor is None:
        return {"rope_theta": model.rope_base, "rope_scaling": None}
    scaling = {
        "rope_type": "llama3",
        "factor": model.rope_scaling_factor,
        "low_freq_factor": model.rope_low_frequency,
        "high_freq_factor": model.rope_high_frequency,
        "original_max_position_embeddings": model.rope_original_positions,
    }
    return {"rope_theta": model.rope_base, "rope_scaling": scaling}


def read(settings: Settings) -> ModelConfig:
    """From config.json."""
    bias = settings["attention_bias"]
    settings.only("mlp_bias", bias)
    return ModelConfig(**read_shape(settings) | {"bias": bias})


def write(model: ModelConfig) -> dict[str, Any]:
    """To config.json."""
    return {**write_shape(model), "attention_bias": model.bias, "mlp_bias": model.bias}


LLAMA = Family(
    model_type="llama",
    architecture=lambda _: "LlamaForCausalLM",
    defaults=DEFAULTS,
    read=read,
    write=write,
    table=lambda _: TABLE,
    prefix="model.",
    twins=TWINS,
)
