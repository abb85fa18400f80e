"""Mixtral: Mistral with a mixture of experts in every layer."""

from __future__ import annotations

from typing import Any

from megajax.config.model import ModelConfig
from megajax.interop.hf.family import Family, Table
from megajax.interop.hf.llama import DEFAULTS, LAYER, TWINS, WITHOUT_MLP, read_shape, write_shape
from megajax.interop.hf.settings import Nullable, Settings

MIXTURE = f"{LAYER}.block_sparse_moe"
EXPERT = f"{MIXTURE}.experts.{{expert}}"
TABLE: Table = {
    **WITHOUT_MLP,
    "blocks.mlp.router": {f"{MIXTURE}.gate.weight": "E D -> D E"},
    "blocks.mlp.fc1": {f"{EXPERT}.w1.weight": "X D -> D 1 X", f"{EXPERT}.w3.weight": "X D -> D 1 X"},
    "blocks.mlp.fc2": {f"{EXPERT}.w2.weight": "D X -> X D"},
}

OWN = {
    "intermediate_size": 14336, "num_key_value_heads": Nullable(int, 8), "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5, "rope_theta": 1e6, "sliding_window": Nullable(int), "num_experts_per_tok": 2,
    "num_local_experts": 8, "router_aux_loss_coef": 0.001, "router_jitter_noise": 0.0,
}  # fmt: skip


def read(settings: Settings) -> ModelConfig:
    """From config.json."""
    settings.only("router_jitter_noise", 0.0)
    return ModelConfig(
        **read_shape(settings),
        window=settings.get("sliding_window"),
        experts=settings["num_local_experts"],
        experts_per_token=settings["num_experts_per_tok"],
        balance_loss=settings["router_aux_loss_coef"],
    )


def write(model: ModelConfig) -> dict[str, Any]:
    """To config.json."""
    return {
        **write_shape(model),
        "intermediate_size": model.expert_size,
        "sliding_window": model.window,
        "num_local_experts": model.experts,
        "num_experts_per_tok": model.experts_per_token,
        "router_aux_loss_coef": model.balance_loss,
    }


MIXTRAL = Family(
    model_type="mixtral",
    architecture=lambda _: "MixtralForCausalLM",
    defaults=DEFAULTS | OWN,
    aliases={"num_experts": "num_local_experts"},
    read=read,
    write=write,
    table=lambda _: TABLE,
    prefix="model.",
    twins=TWINS,
)
