"""The architecture that Megatron-LM's command line described: the `args` that lie in a checkpoint."""

from __future__ import annotations

from argparse import Namespace
from typing import Any

from megajax.config.base import ConfigError
from megajax.config.model import ModelConfig

REFUSED = {
    "num_experts": "mixtures of experts",
    "multi_latent_attention": "latent attention",
    "squared_relu": "squared ReLU",
    "rotary_interleaved": "interleaved rotary embedding",
    "mtp_num_layers": "multi-token prediction",
    "apply_residual_connection_post_layernorm": "residuals behind the norm",
    "hybrid_layer_pattern": "hybrid layers",
    "hybrid_override_pattern": "hybrid layers",
}
"""What has no counterpart here."""
POSITIONS = {"learned_absolute": "learned", "rope": "rope", "none": "none"}


def read_architecture(args: Namespace) -> ModelConfig:
    """The model of a checkpoint; its vocabulary is the padded one, as the true size is not recorded.

    Raises:
        ConfigError: names the argument that has no counterpart.
    """

    def value(name: str, default: Any = None) -> Any:
        return getattr(args, name, default)

    for name, kind in REFUSED.items():
        if value(name):
            raise ConfigError(f"args.{name} of the checkpoint asks for {kind}, which cannot be imported")
    positions = value("position_embedding_type", "learned_absolute")
    if positions not in POSITIONS:
        raise ConfigError(f"args.position_embedding_type {positions} cannot be imported: only {', '.join(POSITIONS)}")
    window = value("window_size")
    bias = bool(value("add_bias_linear", True))
    return ModelConfig(
        num_layers=args.num_layers,
        hidden_size=args.hidden_size,
        num_heads=args.num_attention_heads,
        num_kv_heads=value("num_query_groups") if value("group_query_attention") else None,
        head_dim=value("kv_channels"),
        ffn_hidden_size=value("ffn_hidden_size"),
        max_positions=value("max_position_embeddings") or args.seq_length,
        vocab_size=args.padded_vocab_size,
        positions=POSITIONS[positions],  # type: ignore[arg-type]
        rope_base=float(value("rotary_base", 10_000)),
        rope_fraction=float(value("rotary_percent", 1.0)),
        norm="rmsnorm" if value("normalization", "LayerNorm") == "RMSNorm" else "layernorm",
        norm_eps=float(value("norm_epsilon") or value("layernorm_epsilon", 1e-5)),
        activation="swiglu" if value("swiglu") else "gelu",
        bias=bias,
        qkv_bias=bool(value("add_qkv_bias")) or bias,
        qk_norm=bool(value("qk_layernorm")),
        tied_head=not value("untie_embeddings_and_output_weights", False),
        attention_dropout=float(value("attention_dropout", 0.0)),
        hidden_dropout=float(value("hidden_dropout", 0.0)),
        rope_scaling_factor=float(value("rope_scaling_factor", 8.0)) if value("use_rope_scaling") else None,
        window=window[0] + 1 if window and window[0] >= 0 else None,
    )
