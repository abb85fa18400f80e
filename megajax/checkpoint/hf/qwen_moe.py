"""Qwen's mixtures of experts: Qwen 2 with an MLP beside the experts that all tokens use, Qwen 3 without one."""

from __future__ import annotations

from typing import Any

from megajax.checkpoint.hf.family import Family, Table
from megajax.checkpoint.hf.llama import MLP, TWINS, WITHOUT_MLP, read_shape, write_shape
from megajax.checkpoint.hf.qwen import read_window, write_window
from megajax.checkpoint.hf.settings import Settings
from megajax.config.model import ModelConfig

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


def _read_mixture(settings: Settings) -> dict[str, Any]:
    settings.only("decoder_sparse_step", 1)
    settings.only("mlp_only_layers", [], None)
    key = "num_experts" if "num_experts" in settings.values else "num_local_experts"
    return {
        **read_shape(settings),
        "window": read_window(settings),
        "experts": settings[key],
        "experts_per_token": settings["num_experts_per_tok"],
        "expert_ffn_size": settings["moe_intermediate_size"],
        "router_renormalize": settings.get("norm_topk_prob", False),
        "balance_loss": settings.get("router_aux_loss_coef", 0.0),
    }


def _write_mixture(model: ModelConfig) -> dict[str, Any]:
    return {
        **write_shape(model),
        **write_window(model),
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
        qkv_bias=settings.get("qkv_bias", True),
        shared_ffn_size=settings["shared_expert_intermediate_size"],
        shared_gate=True,
    )


def write_qwen2(model: ModelConfig) -> dict[str, Any]:
    """To config.json."""
    return {
        **_write_mixture(model),
        "qkv_bias": model.has_qkv_bias,
        "shared_expert_intermediate_size": model.shared_ffn_size,
    }


def read_qwen3(settings: Settings) -> ModelConfig:
    """From config.json."""
    settings.only("attention_bias", False)
    return ModelConfig(**_read_mixture(settings), qk_norm=True)


QWEN2_MOE = Family(
    model_type="qwen2_moe",
    architecture=lambda _: "Qwen2MoeForCausalLM",
    read=read_qwen2,
    write=write_qwen2,
    table=lambda _: TABLE,
    prefix="model.",
    twins=TWINS,
)
QWEN3_MOE = Family(
    model_type="qwen3_moe",
    architecture=lambda _: "Qwen3MoeForCausalLM",
    read=read_qwen3,
    write=_write_mixture,
    table=lambda _: TABLE,
    prefix="model.",
    twins=TWINS,
)
