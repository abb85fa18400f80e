"""GPT-2. Its `Conv1D` keeps matrices as (in, out), ours do too: nothing is transposed."""

from __future__ import annotations

from typing import Any

from megajax.config.model import ModelConfig
from megajax.interop.hf.family import Family, Table
from megajax.interop.hf.settings import ACTIVATIONS, Nullable, Settings, activation_name

LAYER = "transformer.h.{layer}"
TABLE: Table = {
    "word_embedding": {"transformer.wte.weight": "V D -> V D"},
    "position_embedding": {"transformer.wpe.weight": "P D -> P D"},
    "blocks.attention_norm.scale": {f"{LAYER}.ln_1.weight": "D -> D"},
    "blocks.attention_norm.bias": {f"{LAYER}.ln_1.bias": "D -> D"},
    "blocks.attention.qkv": {f"{LAYER}.attn.c_attn.weight": "D (3 K H) -> D K 3 H"},
    "blocks.attention.qkv_bias": {f"{LAYER}.attn.c_attn.bias": "(3 K H) -> K 3 H"},
    "blocks.attention.out": {f"{LAYER}.attn.c_proj.weight": "(N H) D -> N H D"},
    "blocks.attention.out_bias": {f"{LAYER}.attn.c_proj.bias": "D -> D"},
    "blocks.mlp_norm.scale": {f"{LAYER}.ln_2.weight": "D -> D"},
    "blocks.mlp_norm.bias": {f"{LAYER}.ln_2.bias": "D -> D"},
    "blocks.mlp.fc1": {f"{LAYER}.mlp.c_fc.weight": "D F -> D 1 F"},
    "blocks.mlp.fc1_bias": {f"{LAYER}.mlp.c_fc.bias": "F -> 1 F"},
    "blocks.mlp.fc2": {f"{LAYER}.mlp.c_proj.weight": "F D -> F D"},
    "blocks.mlp.fc2_bias": {f"{LAYER}.mlp.c_proj.bias": "D -> D"},
    "final_norm.scale": {"transformer.ln_f.weight": "D -> D"},
    "final_norm.bias": {"transformer.ln_f.bias": "D -> D"},
    "head": {"lm_head.weight": "V D -> V D"},
}


DEFAULTS = {
    "vocab_size": 50257, "n_positions": 1024, "n_embd": 768, "n_layer": 12, "n_head": 12, "n_inner": Nullable(int),
    "activation_function": "gelu_new", "resid_pdrop": 0.1, "attn_pdrop": 0.1, "layer_norm_epsilon": 1e-5,
    "initializer_range": 0.02, "scale_attn_weights": True, "scale_attn_by_inverse_layer_idx": False,
    "add_cross_attention": False, "tie_word_embeddings": True,
}  # fmt: skip
ALIASES = {
    "hidden_size": "n_embd",
    "max_position_embeddings": "n_positions",
    "num_attention_heads": "n_head",
    "num_hidden_layers": "n_layer",
}


def read(settings: Settings) -> ModelConfig:
    """From config.json."""
    settings.only("add_cross_attention", False)
    settings.only("scale_attn_weights", True)
    settings.only("scale_attn_by_inverse_layer_idx", False)
    return ModelConfig(
        num_layers=settings["n_layer"],
        hidden_size=settings["n_embd"],
        num_heads=settings["n_head"],
        ffn_hidden_size=settings.get("n_inner"),
        max_positions=settings["n_positions"],
        vocab_size=settings["vocab_size"],
        activation=settings.choose("activation_function", ACTIVATIONS),
        norm_eps=settings["layer_norm_epsilon"],
        tied_head=settings["tie_word_embeddings"],
        hidden_dropout=settings["resid_pdrop"],
        attention_dropout=settings["attn_pdrop"],
        init_std=settings["initializer_range"],
    )


def write(model: ModelConfig) -> dict[str, Any]:
    """To config.json."""
    return {
        "n_layer": model.num_layers,
        "n_embd": model.hidden_size,
        "n_head": model.num_heads,
        "n_inner": model.ffn_hidden_size,
        "n_positions": model.max_positions,
        "vocab_size": model.vocab_size,
        "activation_function": activation_name(model),
        "layer_norm_epsilon": model.norm_eps,
        "tie_word_embeddings": model.tied_head,
        "resid_pdrop": model.hidden_dropout,
        "embd_pdrop": model.hidden_dropout,
        "attn_pdrop": model.attention_dropout,
        "initializer_range": model.init_std,
    }


GPT2 = Family(
    model_type="gpt2",
    architecture=lambda _: "GPT2LMHeadModel",
    defaults=DEFAULTS,
    aliases=ALIASES,
    read=read,
    write=write,
    table=lambda _: TABLE,
    prefix="transformer.",
    twins={"lm_head.weight": "transformer.wte.weight"},
)
