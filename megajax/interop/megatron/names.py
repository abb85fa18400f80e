"""Names and layouts of the weights of all versions of Megatron-LM, in patterns that read them as ours.

Weights are stored [out, in]. Rows of linear_qkv go by query group: its queries, its key, its value (since
checkpoint_version 2; older ones are brought into that order). The whole tensor of a gated MLP is [gate; up].
"""

from __future__ import annotations

import re
from typing import NamedTuple

import numpy as np

from megajax.config.base import InputError
from megajax.config.model import ModelConfig
from megajax.interop.megatron.arguments import Architecture
from megajax.interop.patterns import Table, dense, dims, norm, rearrange, theirs_shape

IGNORED = re.compile(r"_extra_state|inv_freq|word_embeddings_for_head|\.masked_bias|\.attn\.bias")
"""Names of entries that are no weights: state of the runtime, and the copy of a tied table that the last stage held."""
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
"""Patterns of names in older versions, of norms that are fused into the layer behind them, and of experts in all their
containers -> names in Megatron core; one expert is mlp.experts.0.linear_fc1.weight, all of them are
mlp.experts.linear_fc1.weight.
"""
ONE_EXPERT = re.compile(r"(?<=mlp\.experts\.)(\d+)\.")


def canonical(name: str) -> str | None:
    """Return the name in Megatron core, or None for an entry that is no weight."""
    if IGNORED.search(name):
        return None
    for pattern, better in RENAMED:
        name = re.sub(pattern, better, name)
    return name


WHOLE: Table = {
    "word_embedding": {"embedding.word_embeddings.weight": "V D -> V D"},
    "position_embedding": {"embedding.position_embeddings.weight": "P D -> P D"},
    "token_type_embedding": {"embedding.tokentype_embeddings.weight": "T D -> T D"},
    **norm("final_norm", "decoder.final_layernorm"),
    "head": {"output_layer.weight": "V D -> V D"},
    "head_bias": {"output_layer.bias": "V -> V"},
    **dense("transform", "lm_head.dense", "C D -> D C", "D -> D"),
    **norm("transform_norm", "lm_head.layer_norm"),
    **dense("pooler", "pooler.dense", "C D -> D C", "D -> D"),
    "pair_head": {"binary_head.weight": "2 D -> D 2"},
    "pair_bias": {"binary_head.bias": "2 -> 2"},
}
"""Weights of the model outside its layers."""
LAYER: Table = {
    **norm("blocks.attention_norm", "input_layernorm"),
    **dense("blocks.attention.qkv", "self_attention.linear_qkv", "(K Q H) D -> D K Q H", "(K Q H) -> K Q H"),
    **dense("blocks.attention.out", "self_attention.linear_proj", "D (N H) -> N H D", "D -> D"),
    **norm("blocks.attention.q_norm", "self_attention.q_layernorm", "H -> H"),
    **norm("blocks.attention.k_norm", "self_attention.k_layernorm", "H -> H"),
    **norm("blocks.mlp_norm", "pre_mlp_layernorm"),
    **dense("blocks.mlp.fc1", "mlp.linear_fc1", "(A F) D -> D A F", "(A F) -> A F"),
    **dense("blocks.mlp.fc2", "mlp.linear_fc2", "D F -> F D", "D -> D"),
}
"""Weights of a layer, named without its number."""
MIXTURE: Table = {
    "blocks.mlp.router": {"mlp.router.weight": "E D -> D E"},
    **dense("blocks.mlp.fc1", "mlp.experts.linear_fc1", "E (A X) D -> E D A X"),
    **dense("blocks.mlp.fc2", "mlp.experts.linear_fc2", "E D X -> E X D"),
    **dense("blocks.mlp.shared.fc1", "mlp.shared_experts.linear_fc1", "(A Y) D -> D A Y"),
    **dense("blocks.mlp.shared.fc2", "mlp.shared_experts.linear_fc2", "D Y -> Y D"),
    "blocks.mlp.shared_gate": {"mlp.shared_experts.gate_weight": "1 D -> D"},
}
"""Weights of a layer with experts, all of them in one tensor."""


class Row(NamedTuple):
    """Tie one of Megatron-LM's tensors to our parameter (of a layer) that it becomes."""

    ours: str
    pattern: str

    def convert(self, tensor: np.ndarray, architecture: Architecture) -> np.ndarray:
        """Return a tensor in the layout of our parameter.

        Raises:
            InputError: the shape of the tensor is not the one that the architecture gives it.
        """
        sizes = dims(architecture.model)
        if self.pattern.startswith("V"):  # rows behind the vocabulary pad it
            tensor = tensor[: sizes["V"]]
        if tensor.shape != theirs_shape(self.pattern, sizes):
            raise InputError(
                f"the checkpoint's {self.ours} has shape {tensor.shape}, the model of its args "
                f"{theirs_shape(self.pattern, sizes)}"
            )
        x = rearrange(tensor, self.pattern, sizes)
        if architecture.zero_centered and self.ours.endswith(".scale"):
            x = x + np.float32(1)
        if architecture.interleaved and ("q_norm." in self.ours or "k_norm." in self.ours):
            return _halves(x, architecture.model)
        if architecture.interleaved and "attention.qkv" in self.ours:
            return np.concatenate([_halves(x[..., :-1, :], architecture.model), x[..., -1:, :]], axis=-2)
        return x


def by_their_name(*tables: Table) -> dict[str, Row]:
    """Turn tables around: Megatron-LM's name -> our parameter and the pattern."""
    return {
        name: Row(ours, pattern) for table in tables for ours, row in table.items() for name, pattern in row.items()
    }


def _halves(x: np.ndarray, model: ModelConfig) -> np.ndarray:
    """Move the first of each rotary pair in [..., H], whose pairs are neighbours, to the first half of what rotates."""
    rotated = model.rotated_dims
    return x[..., [*range(0, rotated, 2), *range(1, rotated, 2), *range(rotated, model.head_size)]]
