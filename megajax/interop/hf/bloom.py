"""BLOOM: ALiBi, a norm of the embedding, and query, key and value side by side in every head."""

from __future__ import annotations

from typing import Any

from megajax.config.model import ModelConfig
from megajax.interop.hf.family import Family, Table
from megajax.interop.hf.settings import Settings

LAYER = "transformer.h.{layer}"
ATTENTION = f"{LAYER}.self_attention"
TABLE: Table = {
    "word_embedding": {"transformer.word_embeddings.weight": "V D -> V D"},
    "embedding_norm.scale": {"transformer.word_embeddings_layernorm.weight": "D -> D"},
    "embedding_norm.bias": {"transformer.word_embeddings_layernorm.bias": "D -> D"},
    "blocks.attention_norm.scale": {f"{LAYER}.input_layernorm.weight": "D -> D"},
    "blocks.attention_norm.bias": {f"{LAYER}.input_layernorm.bias": "D -> D"},
    "blocks.attention.qkv": {f"{ATTENTION}.query_key_value.weight": "(K 3 H) D -> D K 3 H"},
    "blocks.attention.qkv_bias": {f"{ATTENTION}.query_key_value.bias": "(K 3 H) -> K 3 H"},
    "blocks.attention.out": {f"{ATTENTION}.dense.weight": "D (N H) -> N H D"},
    "blocks.attention.out_bias": {f"{ATTENTION}.dense.bias": "D -> D"},
    "blocks.mlp_norm.scale": {f"{LAYER}.post_attention_layernorm.weight": "D -> D"},
    "blocks.mlp_norm.bias": {f"{LAYER}.post_attention_layernorm.bias": "D -> D"},
    "blocks.mlp.fc1": {f"{LAYER}.mlp.dense_h_to_4h.weight": "F D -> D 1 F"},
    "blocks.mlp.fc1_bias": {f"{LAYER}.mlp.dense_h_to_4h.bias": "F -> 1 F"},
    "blocks.mlp.fc2": {f"{LAYER}.mlp.dense_4h_to_h.weight": "D F -> F D"},
    "blocks.mlp.fc2_bias": {f"{LAYER}.mlp.dense_4h_to_h.bias": "D -> D"},
    "final_norm.scale": {"transformer.ln_f.weight": "D -> D"},
    "final_norm.bias": {"transformer.ln_f.bias": "D -> D"},
    "head": {"lm_head.weight": "V D -> V D"},
}


DEFAULTS = {
    "vocab_size": 250880, "hidden_size": 64, "n_layer": 2, "n_head": 8, "layer_norm_epsilon": 1e-5,
    "initializer_range": 0.02, "apply_residual_connection_post_layernorm": False, "hidden_dropout": 0.0,
    "attention_dropout": 0.0, "tie_word_embeddings": True,
    "seq_length": 2048,  # which transformers does not ask for: ALiBi knows no longest sequence
}  # fmt: skip
ALIASES = {"num_hidden_layers": "n_layer", "num_attention_heads": "n_head", "n_embed": "hidden_size"}


def read(settings: Settings) -> ModelConfig:
    """From config.json."""
    settings.only("apply_residual_connection_post_layernorm", False)
    return ModelConfig(
        num_layers=settings["n_layer"],
        hidden_size=settings["hidden_size"],
        num_heads=settings["n_head"],
        max_positions=settings["seq_length"],
        vocab_size=settings["vocab_size"],
        positions="alibi",
        embedding_norm=True,
        norm_eps=settings["layer_norm_epsilon"],
        tied_head=settings["tie_word_embeddings"],
        hidden_dropout=settings["hidden_dropout"],
        attention_dropout=settings["attention_dropout"],
        init_std=settings["initializer_range"],
    )


def write(model: ModelConfig) -> dict[str, Any]:
    """To config.json."""
    return {
        "n_layer": model.num_layers,
        "hidden_size": model.hidden_size,
        "n_head": model.num_heads,
        "seq_length": model.max_positions,
        "vocab_size": model.vocab_size,
        "layer_norm_epsilon": model.norm_eps,
        "tie_word_embeddings": model.tied_head,
        "hidden_dropout": model.hidden_dropout,
        "attention_dropout": model.attention_dropout,
        "initializer_range": model.init_std,
    }


BLOOM = Family(
    model_type="bloom",
    architecture=lambda _: "BloomForCausalLM",
    defaults=DEFAULTS,
    aliases=ALIASES,
    read=read,
    write=write,
    table=lambda _: TABLE,
    prefix="transformer.",
    twins={"lm_head.weight": "transformer.word_embeddings.weight"},
)
