"""Families of Hugging Face's mixtures of experts: Mixtral and Qwen's, which are LLaMA except for the MLP."""

from __future__ import annotations

from megajax.interop.hf.decoders import (
    LLAMA_LAYER,
    LLAMA_MLP,
    MISTRAL_ROWS,
    QWEN_ROWS,
    WITHOUT_MLP,
    llama_like,
    window_row,
)
from megajax.interop.hf.family import Nullable, Row, Rows, always, field, only, told, with_defaults
from megajax.interop.patterns import Table, dense

_MIXTURE = f"{LLAMA_LAYER}.block_sparse_moe"
MIXTRAL = llama_like(
    "mixtral",
    "MixtralForCausalLM",
    (
        only("router_jitter_noise", 0.0),
        *with_defaults(MISTRAL_ROWS, rms_norm_eps=1e-5, rope_theta=1e6),
        told("intermediate_size", lambda model: model.expert_size),
        field("sliding_window", "window", Nullable(int)),
        field("num_local_experts", "experts", 8, "num_experts"),
        field("num_experts_per_tok", "experts_per_token", 2),
        field("router_aux_loss_coef", "balance_loss", 0.001),
    ),
    {
        **WITHOUT_MLP,
        "blocks.mlp.router": {f"{_MIXTURE}.gate.weight": "E D -> D E"},
        **dense("blocks.mlp.fc1", [f"{_MIXTURE}.experts.{{expert}}.{name}" for name in ("w1", "w3")], "X D -> D 1 X"),
        **dense("blocks.mlp.fc2", f"{_MIXTURE}.experts.{{expert}}.w2", "D X -> X D"),
    },
)


_ONE_WINDOW = Row(
    {"use_sliding_window": False, "sliding_window": Nullable(int, 4096)},
    lambda settings: {"window": settings.get("sliding_window") if settings["use_sliding_window"] else None},
    lambda model: {"use_sliding_window": model.window is not None, "sliding_window": model.window},
)
_QWEN_MIXTURE: Rows = (
    only("decoder_sparse_step", 1, written=True),
    only("mlp_only_layers", [], None, default=Nullable(list), written=True),
    *with_defaults(QWEN_ROWS, hidden_size=2048, num_hidden_layers=24),
    field("num_experts_per_tok", "experts_per_token", 4),
    field("moe_intermediate_size", "expert_ffn_size", 768),
    field("norm_topk_prob", "router_renormalize", False),
    field("router_aux_loss_coef", "balance_loss", 0.001),
)
_GATE_UP = ("gate_proj", "up_proj")
QWEN_MIXTURE_TABLE: Table = {
    **WITHOUT_MLP,
    "blocks.mlp.router": {f"{LLAMA_MLP}.gate.weight": "E D -> D E"},
    **dense("blocks.mlp.fc1", [f"{LLAMA_MLP}.experts.{{expert}}.{name}" for name in _GATE_UP], "X D -> D 1 X"),
    **dense("blocks.mlp.fc2", f"{LLAMA_MLP}.experts.{{expert}}.down_proj", "D X -> X D"),
    **dense("blocks.mlp.shared.fc1", [f"{LLAMA_MLP}.shared_expert.{name}" for name in _GATE_UP], "Y D -> D 1 Y"),
    **dense("blocks.mlp.shared.fc2", f"{LLAMA_MLP}.shared_expert.down_proj", "D Y -> Y D"),
    "blocks.mlp.shared_gate": {f"{LLAMA_MLP}.shared_expert_gate.weight": "1 D -> D"},
}
QWEN2_MOE = llama_like(
    "qwen2_moe",
    "Qwen2MoeForCausalLM",
    (
        *with_defaults(
            _QWEN_MIXTURE,
            intermediate_size=5632,
            num_attention_heads=16,
            num_key_value_heads=Nullable(int, 16),
            moe_intermediate_size=1408,
        ),
        field("num_experts", "experts", 60),
        window_row(first_layers=True),
        field("qkv_bias", "qkv_bias", True),
        field("shared_expert_intermediate_size", "shared_ffn_size", 5632),
        always(shared_gate=True),
    ),
    QWEN_MIXTURE_TABLE,
)
QWEN3_MOE = llama_like(
    "qwen3_moe",
    "Qwen3MoeForCausalLM",
    (
        only("attention_bias", False),
        _ONE_WINDOW,
        *with_defaults(
            _QWEN_MIXTURE, intermediate_size=6144, num_key_value_heads=Nullable(int, 4), num_experts_per_tok=8
        ),
        field("num_experts", "experts", 128, "num_local_experts"),
        always(qk_norm=True),
    ),
    QWEN_MIXTURE_TABLE,
)

MIXTURES = (MIXTRAL, QWEN2_MOE, QWEN3_MOE)
