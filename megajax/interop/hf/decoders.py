"""Families of Hugging Face's decoders: GPT-2, BLOOM, and LLaMA with its relatives."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megajax.config.model import ModelConfig
from megajax.interop.hf.family import (
    ACTIVATIONS,
    Family,
    Nullable,
    Row,
    Rows,
    Settings,
    always,
    choice,
    field,
    only,
    told,
    with_defaults,
)
from megajax.interop.patterns import Table, dense, norm, projections

_GPT2 = "transformer.h.{layer}"
GPT2_TABLE: Table = {
    "word_embedding": {"transformer.wte.weight": "V D -> V D"},
    "position_embedding": {"transformer.wpe.weight": "P D -> P D"},
    **norm("blocks.attention_norm", f"{_GPT2}.ln_1"),
    **dense("blocks.attention.qkv", f"{_GPT2}.attn.c_attn", "D (3 K H) -> D K 3 H", "(3 K H) -> K 3 H"),
    **dense("blocks.attention.out", f"{_GPT2}.attn.c_proj", "(N H) D -> N H D", "D -> D"),
    **norm("blocks.mlp_norm", f"{_GPT2}.ln_2"),
    **dense("blocks.mlp.fc1", f"{_GPT2}.mlp.c_fc", "D F -> D 1 F", "F -> 1 F"),
    **dense("blocks.mlp.fc2", f"{_GPT2}.mlp.c_proj", "F D -> F D", "D -> D"),
    **norm("final_norm", "transformer.ln_f"),
    "head": {"lm_head.weight": "V D -> V D"},
}
"""Tensors of GPT-2, whose `Conv1D` keeps matrices as (in, out) like ours: nothing is transposed."""
GPT2 = Family(
    model_type="gpt2",
    architecture=lambda _: "GPT2LMHeadModel",
    rows=(
        only("add_cross_attention", False),
        only("scale_attn_weights", True),
        only("scale_attn_by_inverse_layer_idx", False),
        field("n_layer", "num_layers", 12, "num_hidden_layers"),
        field("n_embd", "hidden_size", 768, "hidden_size"),
        field("n_head", "num_heads", 12, "num_attention_heads"),
        field("n_inner", "ffn_hidden_size", Nullable(int), written="ffn_hidden_size"),
        field("n_positions", "max_positions", 1024, "max_position_embeddings"),
        field("vocab_size", "vocab_size", 50257),
        choice("activation_function", "activation", "gelu_new", ACTIVATIONS),
        field("layer_norm_epsilon", "norm_eps", 1e-5),
        field("tie_word_embeddings", "tied_head", True),
        field("resid_pdrop", "hidden_dropout", 0.1),
        told("embd_pdrop", lambda model: model.hidden_dropout),
        field("attn_pdrop", "attention_dropout", 0.1),
        field("initializer_range", "init_std", 0.02),
    ),
    table=lambda _: GPT2_TABLE,
    prefix="transformer.",
    twins={"lm_head.weight": "transformer.wte.weight"},
)

_BLOOM = "transformer.h.{layer}"
BLOOM_TABLE: Table = {
    "word_embedding": {"transformer.word_embeddings.weight": "V D -> V D"},
    **norm("embedding_norm", "transformer.word_embeddings_layernorm"),
    **norm("blocks.attention_norm", f"{_BLOOM}.input_layernorm"),
    **dense(
        "blocks.attention.qkv", f"{_BLOOM}.self_attention.query_key_value", "(K 3 H) D -> D K 3 H", "(K 3 H) -> K 3 H"
    ),
    **dense("blocks.attention.out", f"{_BLOOM}.self_attention.dense", "D (N H) -> N H D", "D -> D"),
    **norm("blocks.mlp_norm", f"{_BLOOM}.post_attention_layernorm"),
    **dense("blocks.mlp.fc1", f"{_BLOOM}.mlp.dense_h_to_4h", "F D -> D 1 F", "F -> 1 F"),
    **dense("blocks.mlp.fc2", f"{_BLOOM}.mlp.dense_4h_to_h", "D F -> F D", "D -> D"),
    **norm("final_norm", "transformer.ln_f"),
    "head": {"lm_head.weight": "V D -> V D"},
}
"""Tensors of BLOOM, in which query, key and value lie side by side in every head."""
BLOOM = Family(
    model_type="bloom",
    architecture=lambda _: "BloomForCausalLM",
    rows=(
        always(positions="alibi", embedding_norm=True),
        only("apply_residual_connection_post_layernorm", False),
        field("n_layer", "num_layers", 2, "num_hidden_layers"),
        field("hidden_size", "hidden_size", 64, "n_embed"),
        field("n_head", "num_heads", 8, "num_attention_heads"),
        field("seq_length", "max_positions", 2048),  # transformers does not ask for it: ALiBi knows no longest sequence
        field("vocab_size", "vocab_size", 250880),
        field("layer_norm_epsilon", "norm_eps", 1e-5),
        field("tie_word_embeddings", "tied_head", True),
        field("hidden_dropout", "hidden_dropout", 0.0),
        field("attention_dropout", "attention_dropout", 0.0),
        field("initializer_range", "init_std", 0.02),
    ),
    table=lambda _: BLOOM_TABLE,
    prefix="transformer.",
    twins={"lm_head.weight": "transformer.word_embeddings.weight"},
)


ROPE_KEYS = {
    "rope_type": Nullable(str), "type": Nullable(str), "rope_theta": Nullable(float), "factor": Nullable(float),
    "low_freq_factor": Nullable(float), "high_freq_factor": Nullable(float),
    "original_max_position_embeddings": Nullable(int), "partial_rotary_factor": Nullable(float),
}  # fmt: skip
"""Keys of `rope_scaling` and `rope_parameters`, with their defaults."""


def _read_rope(settings: Settings, share: float | None) -> Mapping[str, Any]:
    """Read the rotary embedding; `rope_parameters` is the newer form of two keys, whose older form wins."""
    key = "rope_scaling" if settings.get("rope_scaling") else "rope_parameters"
    rope = Settings(settings.get(key) or {}, ROPE_KEYS, within=f"{key}.")
    if unknown := rope.values.keys() - ROPE_KEYS.keys():
        settings.refuse(key, f"no {sorted(unknown)[0]} there")
    read = _read_share(settings, rope, share) | {"rope_base": rope.get("rope_theta") or settings["rope_theta"]}
    match rope.get("rope_type") or rope.get("type") or "default":
        case "default":
            return read
        case "llama3":
            return read | {
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


def _read_share(settings: Settings, rope: Settings, share: float | None) -> dict[str, Any]:
    """Read the share of each head that is rotated, by default `share`; None where the whole head always is."""
    key = "partial_rotary_factor"
    if share is None:
        for where in (settings, rope):
            where.only(key, None, 1.0)
        return {}
    said = next((where for where in (rope, settings) if where.get(key) is not None), settings)
    share = share if said.get(key) is None else said[key]
    head = settings.get("head_dim") or settings["hidden_size"] // (settings["num_attention_heads"] or 1)
    if not 0 < share <= 1 or int(head * share) % 2:
        said.refuse(key, f"shares that are an even number of the {head} dims of a head")
    return {"rope_fraction": share}


def write_rope(model: ModelConfig) -> Mapping[str, Any]:
    """Return the keys of the rotary embedding in their older form."""
    scaling = {
        "rope_type": "llama3",
        "factor": model.rope_scaling_factor,
        "low_freq_factor": model.rope_low_frequency,
        "high_freq_factor": model.rope_high_frequency,
        "original_max_position_embeddings": model.rope_original_positions,
    }
    return {"rope_theta": model.rope_base, "rope_scaling": None if model.rope_scaling_factor is None else scaling}


def rope_row(share: float | None = None) -> Row:
    """Make the row of the rotary embedding.

    Args:
        share: share of each head that is rotated where the file names none; None for a family that rotates whole heads.
    """

    def write(model: ModelConfig) -> Mapping[str, Any]:
        partial = {} if share is None else {"partial_rotary_factor": model.rope_fraction}
        return {**write_rope(model), **partial}

    keys = {
        "rope_theta": 10_000.0,
        "rope_scaling": Nullable(dict),
        "rope_parameters": Nullable(dict),
        "partial_rotary_factor": Nullable(float),
        "original_max_position_embeddings": Nullable(int),
    }
    return Row(keys, lambda settings: _read_rope(settings, share), write, forms=("rope_parameters",))


ROPE = rope_row()
DIMENSIONS: Rows = (
    field("num_hidden_layers", "num_layers", 32),
    field("hidden_size", "hidden_size", 4096),
    field("num_attention_heads", "num_heads", 32),
    field("num_key_value_heads", "num_kv_heads", Nullable(int)),
    field("intermediate_size", "ffn_hidden_size", 11008),
    field("max_position_embeddings", "max_positions", 2048),
    field("vocab_size", "vocab_size", 32000),
    field("tie_word_embeddings", "tied_head", False),
    field("attention_dropout", "attention_dropout", 0.0),
    field("initializer_range", "init_std", 0.02),
)
SIZES: Rows = (
    always(positions="rope", norm="rmsnorm"),
    *DIMENSIONS,
    field("head_dim", "head_dim", Nullable(int)),
    field("rms_norm_eps", "norm_eps", 1e-6),
)
SHAPE: Rows = (always(activation="swiglu"), only("hidden_act", "silu", written=True), *SIZES, ROPE)
"""Rows that LLaMA and its relatives have in common, with LLaMA's defaults."""
LLAMA_LAYER = "model.layers.{layer}"
WITHOUT_MLP: Table = {
    "word_embedding": {"model.embed_tokens.weight": "V D -> V D"},
    "blocks.attention_norm.scale": {f"{LLAMA_LAYER}.input_layernorm.weight": "D -> D"},
    **projections("blocks.attention.qkv", *(f"{LLAMA_LAYER}.self_attn.{name}_proj" for name in "qkv")),
    "blocks.attention.q_norm.scale": {f"{LLAMA_LAYER}.self_attn.q_norm.weight": "H -> H"},
    "blocks.attention.k_norm.scale": {f"{LLAMA_LAYER}.self_attn.k_norm.weight": "H -> H"},
    **dense("blocks.attention.out", f"{LLAMA_LAYER}.self_attn.o_proj", "D (N H) -> N H D", "D -> D"),
    "blocks.mlp_norm.scale": {f"{LLAMA_LAYER}.post_attention_layernorm.weight": "D -> D"},
    "final_norm.scale": {"model.norm.weight": "D -> D"},
    "head": {"lm_head.weight": "V D -> V D"},
}
LLAMA_MLP = f"{LLAMA_LAYER}.mlp"
LLAMA_TABLE: Table = {
    **WITHOUT_MLP,
    **dense("blocks.mlp.fc1", (f"{LLAMA_MLP}.gate_proj", f"{LLAMA_MLP}.up_proj"), "F D -> D 1 F", "F -> 1 F"),
    **dense("blocks.mlp.fc2", f"{LLAMA_MLP}.down_proj", "D F -> F D", "D -> D"),
}


def llama_like(model_type: str, architecture: str, rows: Rows, table: Table = LLAMA_TABLE) -> Family:
    """Make a family whose tensors have LLaMA's names, or those of a table made of it."""
    return Family(
        model_type=model_type,
        architecture=lambda _: architecture,
        rows=(always(bias=False), *rows),
        table=lambda _: table,
        prefix="model.",
        twins={"lm_head.weight": "model.embed_tokens.weight"},
    )


def _one_bias(settings: Settings) -> Mapping[str, Any]:
    settings.only("mlp_bias", settings["attention_bias"])
    return {"bias": settings["attention_bias"]}


_BIASES = Row(
    {"attention_bias": False, "mlp_bias": False},
    _one_bias,
    lambda model: {"attention_bias": model.bias, "mlp_bias": model.bias},
)
LLAMA = llama_like("llama", "LlamaForCausalLM", (_BIASES, *SHAPE))

MISTRAL_ROWS = with_defaults(
    SHAPE, intermediate_size=14336, num_key_value_heads=Nullable(int, 8), max_position_embeddings=131072
)
MISTRAL = llama_like(
    "mistral", "MistralForCausalLM", (*MISTRAL_ROWS, field("sliding_window", "window", Nullable(int, 4096)))
)

_LAYERNORMS: Table = {
    **WITHOUT_MLP,
    **norm("blocks.attention_norm", f"{LLAMA_LAYER}.input_layernorm"),
    **norm("blocks.mlp_norm", f"{LLAMA_LAYER}.post_attention_layernorm"),
    **norm("final_norm", "model.norm"),
}
STARCODER2 = llama_like(
    "starcoder2",
    "Starcoder2ForCausalLM",
    (
        always(positions="rope"),
        choice("hidden_act", "activation", "gelu_pytorch_tanh", ACTIVATIONS),
        *with_defaults(
            DIMENSIONS,
            num_hidden_layers=30,
            hidden_size=3072,
            num_attention_heads=24,
            num_key_value_heads=2,
            intermediate_size=12288,
            max_position_embeddings=4096,
            vocab_size=49152,
            tie_word_embeddings=True,
            initializer_range=0.018042,
        ),
        field("norm_epsilon", "norm_eps", 1e-5),
        field("use_bias", "bias", True),
        field("residual_dropout", "hidden_dropout", 0.0),
        told("embedding_dropout", lambda model: model.hidden_dropout),
        ROPE,
        field("sliding_window", "window", Nullable(int)),
    ),
    {
        **_LAYERNORMS,
        **dense("blocks.mlp.fc1", f"{LLAMA_MLP}.c_fc", "F D -> D 1 F", "F -> 1 F"),
        **dense("blocks.mlp.fc2", f"{LLAMA_MLP}.c_proj", "D F -> F D", "D -> D"),
    },
)

NEMOTRON = llama_like(
    "nemotron",
    "NemotronForCausalLM",
    (
        _BIASES,
        always(positions="rope", norm_plus_one=True),
        choice("hidden_act", "activation", "relu2", ACTIVATIONS),
        *with_defaults(
            DIMENSIONS,
            hidden_size=6144,
            num_attention_heads=48,
            intermediate_size=24576,
            max_position_embeddings=4096,
            vocab_size=256_000,
            initializer_range=0.0134,
        ),
        field("head_dim", "head_dim", Nullable(int)),
        field("norm_eps", "norm_eps", 1e-5),
        rope_row(share=0.5),
    ),
    {
        **_LAYERNORMS,
        **dense("blocks.mlp.fc1", f"{LLAMA_MLP}.up_proj", "F D -> D 1 F", "F -> 1 F"),
        **dense("blocks.mlp.fc2", f"{LLAMA_MLP}.down_proj", "D F -> F D", "D -> D"),
    },
)


def window_row(*, first_layers: bool) -> Row:
    """Make the row of a sliding window that all layers have or none.

    What the keys mean without `layer_types` differs by version, so the kind of every layer is written.

    Args:
        first_layers: whether `max_window_layers` counts every other one of the first layers, instead of leaving them
            out.
    """

    def read(settings: Settings) -> Mapping[str, Any]:
        layers, count = settings["num_hidden_layers"], settings["max_window_layers"]
        windowed = settings["use_sliding_window"] and settings.get("sliding_window") is not None
        kinds = settings.get("layer_types")
        if kinds is not None:
            kind = kinds[0] if kinds else ""
            known = ("full_attention", "sliding_attention") if windowed else ("full_attention",)
            if kind not in known or len(kinds) != layers or any(other != kind for other in kinds):
                settings.refuse("layer_types", f"{' or '.join(known)} for all of {layers} layers")
            return {"window": settings["sliding_window"] if kind == "sliding_attention" else None}
        none, every = (count <= 0, layers == 1) if first_layers else (count >= layers, count <= 0)
        if windowed and not none and not every:
            settings.refuse("max_window_layers", "one window for all layers, or none")
        return {"window": settings["sliding_window"] if windowed and every and not none else None}

    def write(model: ModelConfig) -> Mapping[str, Any]:
        kind = "full_attention" if model.window is None else "sliding_attention"
        return {
            "use_sliding_window": model.window is not None,
            "sliding_window": model.window,
            "max_window_layers": model.num_layers if model.window is None else 0,
            "layer_types": [kind] * model.num_layers,
        }

    keys = {"use_sliding_window": False, "sliding_window": Nullable(int, 4096)}
    return Row(keys | {"max_window_layers": 28, "layer_types": Nullable(list)}, read, write)


QWEN_ROWS = with_defaults(
    SHAPE,
    vocab_size=151936,
    intermediate_size=22016,
    num_key_value_heads=Nullable(int, 32),
    max_position_embeddings=32768,
)
QWEN2 = llama_like("qwen2", "Qwen2ForCausalLM", (*QWEN_ROWS, always(qkv_bias=True), window_row(first_layers=False)))
QWEN3 = llama_like(
    "qwen3",
    "Qwen3ForCausalLM",
    (
        only("attention_bias", False),
        *with_defaults(QWEN_ROWS, head_dim=128),
        always(qk_norm=True),
        window_row(first_layers=False),
    ),
)

DECODERS = (GPT2, LLAMA, MISTRAL, STARCODER2, QWEN2, QWEN3, BLOOM, NEMOTRON)
