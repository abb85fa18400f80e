"""Qwen's mixtures of experts: Qwen 2 with an MLP beside the experts that all tokens use, Qwen 3 without one."""

from __future__ import annotations

from typing import Any

from megajax.config.model import ModelConfig
from megajax.interop.hf.family import Family, Table
from megajax.interop.hf.llama import DEFAULTS, MLP, TWINS, WITHOUT_MLP, read_shape, write_shape
from megajax.interop.hf.qwen import SIZES, WINDOW, read_window, write_window
from megajax.interop.hf.settings import Nullable, Settings

EXPERT = f"{MLP}.experts.{{expert}}"
SHARED = f"{MLP}.shared_expert"
TABLE: Table = {
    **WITHOUT_MLP,
    "blocks.mlp.router": {f"{MLP}.gate.weight": "E D -> D E"},
    "blocks.mlp.fc1": {f"{EXPERT}.gate_proj.weight": "X D -> D 1 X", f"{EXPERT}.up_proj.weight": "X D -> D 1 X"},
    "blocks.mlp.fc2": {f"{EXPERT}.down_proj.weight": "D X -> X D"},
    "blocks.mlp.shared.fc1": {f"{SHARED}.gate_proj.weight": "Y D -> D 1 Y", f"{SHARED}.up_proj.weight": "Y D -> D 1 Y"},
    "blocks.mlp.shared.fc2": {f"{SHARED}.down_proj.weight": "D Y -> Y D"},
    "blocks.mlp.shared_gate": {f"{MLP}.shared_expert_gate.weight": "1 D -> D"},
}


MIXTURE = SIZES | {
    "hidden_size": 2048, "num_hidden_layers": 24, "num_experts_per_tok": 4, "norm_topk_prob": False,
    "router_aux_loss_coef": 0.001, "decoder_sparse_step": 1, "mlp_only_layers": Nullable(list),
}  # fmt: skip
QWEN2 = {
    "intermediate_size": 5632, "num_attention_heads": 16, "num_key_value_heads": Nullable(int, 16), "num_experts": 60,
    "moe_intermediate_size": 1408, "shared_expert_intermediate_size": 5632, "qkv_bias": True,
}  # fmt: skip
QWEN3 = {
    "intermediate_size": 6144, "num_attention_heads": 32, "num_key_value_heads": Nullable(int, 4), "num_experts": 128,
    "moe_intermediate_size": 768, "num_experts_per_tok": 8, "use_sliding_window": False,
    "sliding_window": Nullable(int, 4096),
}  # fmt: skip


def _read_mixture(settings: Settings) -> dict[str, Any]:
    settings.only("decoder_sparse_step", 1)
    settings.only("mlp_only_layers", [], None)
    return {
        **read_shape(settings),
        "experts": settings["num_experts"],
        "experts_per_token": settings["num_experts_per_tok"],
        "expert_ffn_size": settings["moe_intermediate_size"],
        "router_renormalize": settings["norm_topk_prob"],
        "balance_loss": settings["router_aux_loss_coef"],
    }


def _write_mixture(model: ModelConfig) -> dict[str, Any]:
    return {
        **write_shape(model),
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "num_experts": model.experts,
        "num_experts_per_tok": model.experts_per_token,
        "moe_intermediate_size": model.expert_size,
        "norm_topk_prob": model.router_renormalize,
        "router_aux_loss_coef": model.balance_loss,
    }


def read_qwen2(settings: Settings) -> ModelConfig:
    """From config.json."""
    return ModelConfig(
        **_read_mixture(settings),
        window=read_window(settings, first_layers=True),
        qkv_bias=settings["qkv_bias"],
        shared_ffn_size=settings["shared_expert_intermediate_size"],
        shared_gate=True,
    )


def write_qwen2(model: ModelConfig) -> dict[str, Any]:
    """To config.json."""
    return {
        **_write_mixture(model),
        **write_window(model),
        "qkv_bias": model.has_qkv_bias,
        "shared_expert_intermediate_size": model.shared_ffn_size,
    }


def read_qwen3(settings: Settings) -> ModelConfig:
    """From config.json."""
    settings.only("attention_bias", False)
    window = settings.get("sliding_window") if settings["use_sliding_window"] else None
    return ModelConfig(**_read_mixture(settings), window=window, qk_norm=True)


def write_qwen3(model: ModelConfig) -> dict[str, Any]:
    """To config.json; the window is that of all layers."""
    return {
        **_write_mixture(model),
        "use_sliding_window": model.window is not None,
        "sliding_window": model.window,
    }


QWEN2_MOE = Family(
    model_type="qwen2_moe",
    architecture=lambda _: "Qwen2MoeForCausalLM",
    defaults=DEFAULTS | WINDOW | MIXTURE | QWEN2,
    read=read_qwen2,
    write=write_qwen2,
    table=lambda _: TABLE,
    prefix="model.",
    twins=TWINS,
)
QWEN3_MOE = Family(
    model_type="qwen3_moe",
    architecture=lambda _: "Qwen3MoeForCausalLM",
    defaults=DEFAULTS | MIXTURE | QWEN3,
    aliases={"num_local_experts": "num_experts"},
    read=read_qwen3,
    write=write_qwen3,
    table=lambda _: TABLE,
    prefix="model.",
    twins=TWINS,
)
