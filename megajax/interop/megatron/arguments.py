"""Reading of a model's architecture from Megatron-LM's command line: the `args` that lie in a checkpoint.

An argument is honoured (read here), neutral (see `neutral`), or unset: anything else may change what the model
computes, and is refused by name.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

from pydantic import ValidationError

from megajax.config.base import InputError
from megajax.config.model import Activation, ModelConfig
from megajax.interop.megatron.neutral import is_neutral

REFUSED = {
    "multi_latent_attention": "latent attention",
    "experimental_attention_variant": "an experimental attention",
    "linear_attention_freq": "linear attention",
    "attention_output_gate": "a gate on the attention's output",
    "qk_l2_norm": "queries and keys of length 1",
    "quick_geglu": "a unit gated by the sigmoid form of GELU",
    "glu_linear_offset": "a gated unit with an offset",
    "activation_func_clamp_value": "clamped activations",
    "mtp_num_layers": "multi-token prediction",
    "apply_residual_connection_post_layernorm": "residuals behind the norm",
    "hybrid_layer_pattern": "hybrid layers",
    "hybrid_override_pattern": "hybrid layers",
    "hybrid_attention_ratio": "hybrid layers",
    "hybrid_mlp_ratio": "hybrid layers",
    "is_hybrid_model": "hybrid layers",
    "heterogeneous_layers_config_path": "layers that differ from each other",
    "heterogeneous_layers_config_encoded_json": "layers that differ from each other",
    "retro_add_retriever": "retrieval",
    "use_mup": "maximal update parametrisation",
    "spec": "layers of its own specification",
}
"""Arguments that have no counterpart here -> what they ask for."""
REFUSED_OF_MIXTURES = {
    "moe_router_num_groups": "groups of experts",
    "moe_router_group_topk": "groups of experts",
    "moe_router_topk_limited_devices": "groups of experts",
    "moe_router_topk_scaling_factor": "scaled shares of the experts",
    "moe_router_enable_expert_bias": "a bias on the router's choice",
    "moe_router_force_load_balancing": "random routing",
    "moe_router_force_biased": "random routing",
    "moe_expert_capacity_factor": "experts that drop tokens",
    "moe_token_dropping": "experts that drop tokens",
    "moe_input_jitter_eps": "noise on the router's input",
    "moe_apply_probs_on_input": "shares on the input of the experts",
    "moe_latent_size": "experts of a smaller width",
    "moe_mlp_glu_interleave_size": "interleaved rows of gate and up",
    "moe_shared_expert_glu_interleave_size": "interleaved rows of gate and up",
}
"""Arguments that have no counterpart in mixtures; without experts every argument moe_* is idle."""
NORMS = {"LayerNorm": "layernorm", "RMSNorm": "rmsnorm"}


class Architecture(NamedTuple):
    """The meaning of a checkpoint's weights."""

    model: ModelConfig
    """Model of the weights, whose vocabulary is the padded one, as the true size is not recorded."""
    zero_centered: bool = False
    """Whether gains of norms are stored minus one (`--apply-layernorm-1p`)."""
    interleaved: bool = False
    """Whether the rotary embedding turns neighbours (`--rotary-interleaved`), not the two halves of a head."""


class _Reader:
    """Give the values of arguments, and note the names of those that were asked for."""

    def __init__(self, args: Namespace) -> None:
        self.values = vars(args)
        self.honoured: set[str] = set()

    def __call__(self, name: str, default: Any = None) -> Any:
        """Return the value of an argument, or a default where it is absent or None."""
        self.honoured.add(name)
        value = self.values.get(name)
        return default if value is None else value

    def required(self, name: str) -> Any:
        """Return the value of an argument that every model has."""
        value = self(name)
        if value is None:
            raise InputError(f"the checkpoint's args lack {name}: they are not those of a model")
        return value

    def refuse(self, table: dict[str, str]) -> None:
        """Refuse arguments that are set and have no counterpart."""
        for name, kind in table.items():
            if self(name):
                raise InputError(f"args.{name} of the checkpoint asks for {kind}, which cannot be imported")

    def refuse_rest(self, ignored: Collection[str]) -> None:
        """Refuse arguments that are set, were not asked for and may change the model."""
        rest = {name: value for name, value in self.values.items() if value and name not in self.honoured}
        names = sorted(name for name in rest if not is_neutral(name) and name not in ignored)
        if names:
            given = ", ".join(f"args.{name} = {rest[name]}" for name in names)
            raise InputError(
                f"{given} of the checkpoint may change what the model computes, and is not known here: "
                f"import with --ignore-args {','.join(names)} if it does not"
            )


def read_architecture(args: Namespace, ignored: Collection[str] = (), *, bert: bool = False) -> Architecture:
    """Read the meaning of a checkpoint's weights.

    Args:
        args: arguments in the checkpoint.
        ignored: names of arguments, unknown here, that leave the model alone as the user says.
        bert: whether the model is an encoder with a head for masked tokens.

    Raises:
        InputError: an argument has no counterpart; the message names it.
    """
    value = _Reader(args)
    value.refuse(REFUSED)
    bias, swiglu = bool(value("add_bias_linear", True)), bool(value("swiglu"))
    norm, softmax = value("normalization", "LayerNorm"), value("softmax_type", "vanilla")
    if norm not in NORMS:
        raise InputError(f"args.normalization {norm} cannot be imported: only {', '.join(NORMS)}")
    if softmax != "vanilla":
        raise InputError(f"args.softmax_type {softmax} cannot be imported: only vanilla")
    groups, grouped = value("num_query_groups"), value("group_query_attention")
    epsilon = [value(name) for name in ("norm_epsilon", "layernorm_epsilon")]
    model = _model(
        num_layers=value.required("num_layers"),
        hidden_size=value.required("hidden_size"),
        num_heads=value.required("num_attention_heads"),
        num_kv_heads=groups if grouped else None,
        head_dim=value("kv_channels"),
        ffn_hidden_size=value("ffn_hidden_size"),
        max_positions=value("max_position_embeddings") or value.required("seq_length"),
        vocab_size=value.required("padded_vocab_size"),
        norm=NORMS[norm],
        norm_eps=float(epsilon[0] or epsilon[1] or 1e-5),
        activation=_activation(value, swiglu=swiglu, bias=bias),
        bias=bias,
        qkv_bias=bool(value("add_qkv_bias")) or bias,
        qk_norm=bool(value("qk_layernorm")),
        tied_head=not value("untie_embeddings_and_output_weights", False),
        attention_dropout=float(value("attention_dropout", 0.0)),
        hidden_dropout=float(value("hidden_dropout", 0.0)),
        init_std=float(value("init_method_std", 0.02)),
        attention_scale=value("softmax_scale"),
        window=_window(value, value.required("num_layers")),
        **_positions(value),
        **_mixture(value),
        **(_masked_head(value) if bert else {}),
    )
    zero_centered = [value(name, False) for name in ("apply_layernorm_1p", "layernorm_zero_centered_gamma")]
    interleaved = bool(value("rotary_interleaved")) and model.positions == "rope"
    value.refuse_rest(ignored)
    return Architecture(model, any(zero_centered), interleaved)


def _model(**values: Any) -> ModelConfig:
    try:
        return ModelConfig(**values)
    except InputError as error:
        raise InputError(f"the checkpoint's args: {error}") from None
    except ValidationError as error:
        problem = error.errors()[0]
        key, given = problem["loc"][0], problem["input"]
        raise InputError(f"the checkpoint's args give model.{key} = {given}: {problem['msg']}") from None


def _activation(value: _Reader, *, swiglu: bool, bias: bool) -> Activation:
    """Read the non-linearity; the fused GELU, which needs a bias, is the tanh form, and the other one is exact."""
    fused, tanh = value("bias_gelu_fusion", bias) and bias, value("openai_gelu", False)
    squared = value("squared_relu", False)
    if swiglu or squared:
        return "swiglu" if swiglu else "squared_relu"
    if tanh and not fused:
        raise InputError("args.openai_gelu of the checkpoint was ignored by newer versions: which GELU is not known")
    return "gelu" if fused else "gelu_exact"


def _masked_head(value: _Reader) -> dict[str, Any]:
    """Read BERT's heads, whose GELU for masked tokens is the exact one, whatever the layers have."""
    pairs = bool(value("bert_binary_head", True))
    if value("openai_gelu"):
        raise InputError("args.openai_gelu of the checkpoint of a BERT cannot be imported: versions differ in its head")
    return {"family": "bert", "pair_task": pairs, "token_types": 2 if pairs else 0, "head_activation": "gelu_exact"}


def _positions(value: _Reader) -> dict[str, Any]:
    """Read how tokens know their places."""
    rotary = bool(value("use_rotary_position_embeddings"))  # the whole of it before position_embedding_type was there
    kind = value("position_embedding_type", "rope" if rotary else "learned_absolute")
    learned = "learned" if value("add_position_embedding", True) else "none"
    kinds = {"learned_absolute": learned, "rope": "rope", "none": "none"}
    base, fraction = float(value("rotary_base", 10_000)), float(value("rotary_percent", 1.0))
    scaled, factor = value("use_rope_scaling", False), float(value("rope_scaling_factor", 8.0))
    stretch, skipped = value("rotary_seq_len_interpolation_factor"), value("no_rope_freq")
    if kind not in kinds:
        raise InputError(f"args.position_embedding_type {kind} cannot be imported: only {', '.join(kinds)}")
    found: dict[str, Any] = {"positions": kinds[kind]}
    if kind != "rope":
        return found
    if any(skipped) if isinstance(skipped, Sequence) else skipped:
        raise InputError(f"args.no_rope_freq {skipped} cannot be imported: every layer has to have its positions")
    found |= {"rope_base": base, "rope_fraction": fraction}
    if stretch and scaled:
        raise InputError(
            "args.rotary_seq_len_interpolation_factor and args.use_rope_scaling cannot be imported together"
        )
    if scaled:
        found["rope_scaling_factor"] = factor
    if stretch:  # every wave is slower: none turns as often as there are positions
        limit = float(ModelConfig.rope_original_positions)
        found |= {"rope_scaling_factor": float(stretch), "rope_low_frequency": limit, "rope_high_frequency": 2 * limit}
    return found


def _window(value: _Reader, layers: int) -> int | None:
    """Read how many tokens a token sees, itself included; Megatron counts those before it, and may skip layers."""
    size, skip = value("window_size"), value("window_attn_skip_freq")
    if not size or size[0] < 0:
        return None
    sees_all = {
        not skip[i] if isinstance(skip, Sequence) else bool(skip) and (i + 1) % skip == 0 for i in range(layers)
    }
    if len(sees_all) > 1:
        raise InputError(f"args.window_attn_skip_freq {skip} cannot be imported: all layers have to have one window")
    return None if True in sees_all else size[0] + 1


def _mixture(value: _Reader) -> dict[str, Any]:
    """Read the experts; a softmax over the chosen logits is one over all logits, made to sum to 1 again."""
    experts = value("num_experts")
    if not experts:
        value.honoured |= {name for name in value.values if name.startswith("moe_")}
        return {}
    value.refuse(REFUSED_OF_MIXTURES)
    if value("add_bias_linear", True):
        raise InputError("args.num_experts with args.add_bias_linear cannot be imported: experts here have no biases")
    frequency, score = value("moe_layer_freq", 1), value("moe_router_score_function", "softmax")
    balancing, coefficients = value("moe_router_load_balancing_type", "aux_loss"), value("moe_aux_loss_coeff", 0.0)
    if frequency != 1 and not (isinstance(frequency, Sequence) and all(frequency)):
        raise InputError(f"args.moe_layer_freq {frequency} cannot be imported: all layers have to have experts")
    if score != "softmax":
        raise InputError(f"args.moe_router_score_function {score} cannot be imported: only softmax")
    kinds = [balancing] if isinstance(balancing, str) else list(balancing)
    factors = list(coefficients) if isinstance(coefficients, Sequence) else [coefficients] * len(kinds)
    for kind in kinds:
        if kind not in ("aux_loss", "seq_aux_loss", "global_aux_loss", "none"):
            raise InputError(f"args.moe_router_load_balancing_type {kind} cannot be imported: use a loss")
    return {
        "experts": experts,
        "experts_per_token": value("moe_router_topk", 2),
        "expert_ffn_size": value("moe_ffn_hidden_size"),
        "shared_ffn_size": value("moe_shared_expert_intermediate_size", 0),
        "shared_gate": bool(value("moe_shared_expert_gate")),
        "router_renormalize": not value("moe_router_pre_softmax", False),
        "balance_loss": float(sum(factor for kind, factor in zip(kinds, factors, strict=True) if kind != "none")),
        "z_loss": float(value("moe_z_loss_coeff", 0.0)),
    }
