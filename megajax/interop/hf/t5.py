"""T5: the first release (ReLU, head tied to the embedding) and 1.1 (GELU-gated, head of its own)."""

from __future__ import annotations

from typing import Any

from megajax.config.model import Activation, ModelConfig
from megajax.interop.hf.family import Family, Table
from megajax.interop.hf.settings import Nullable, Settings

FEED_FORWARD: dict[str, Activation] = {"relu": "relu", "gated-gelu": "geglu", "gated-silu": "swiglu"}


def _mlp(ours: str, theirs: str, gated: bool) -> Table:
    """The MLP of a layer, which lies in `theirs`."""
    inputs = ("wi_0", "wi_1") if gated else ("wi",)
    return {
        f"{ours}.mlp_norm.scale": {f"{theirs}.layer_norm.weight": "D -> D"},
        f"{ours}.mlp.fc1": {f"{theirs}.DenseReluDense.{name}.weight": "F D -> D 1 F" for name in inputs},
        f"{ours}.mlp.fc2": {f"{theirs}.DenseReluDense.wo.weight": "D F -> F D"},
    }


def _attention(ours: str, theirs: str) -> Table:
    """Self-attention, which both stacks have first in a layer."""
    return {
        f"{ours}.attention_norm.scale": {f"{theirs}.layer_norm.weight": "D -> D"},
        f"{ours}.attention.qkv": {
            f"{theirs}.SelfAttention.q.weight": "(K G H) D -> D K G H",
            f"{theirs}.SelfAttention.k.weight": "(K H) D -> D K 1 H",
            f"{theirs}.SelfAttention.v.weight": "(K H) D -> D K 1 H",
        },
        f"{ours}.attention.out": {f"{theirs}.SelfAttention.o.weight": "D (N H) -> N H D"},
    }


def table(model: ModelConfig) -> Table:
    """All rows; the bias of relative positions lies in the first layer of a stack and serves all."""
    encoder, decoder = "encoder.block.{layer}.layer", "decoder.block.{layer}.layer"
    bias = "block.0.layer.0.SelfAttention.relative_attention_bias.weight"
    return {
        "word_embedding": {"shared.weight": "V D -> V D"},
        "encoder_bias": {f"encoder.{bias}": "B N -> B N"},
        **_attention("encoder_blocks", f"{encoder}.0"),
        **_mlp("encoder_blocks", f"{encoder}.1", model.gated),
        "encoder_norm.scale": {"encoder.final_layer_norm.weight": "D -> D"},
        "decoder_bias": {f"decoder.{bias}": "B N -> B N"},
        **_attention("blocks", f"{decoder}.0"),
        "blocks.cross_norm.scale": {f"{decoder}.1.layer_norm.weight": "D -> D"},
        "blocks.cross.q": {f"{decoder}.1.EncDecAttention.q.weight": "(N H) D -> D N H"},
        "blocks.cross.kv": {
            f"{decoder}.1.EncDecAttention.k.weight": "(N H) D -> D N 1 H",
            f"{decoder}.1.EncDecAttention.v.weight": "(N H) D -> D N 1 H",
        },
        "blocks.cross.out": {f"{decoder}.1.EncDecAttention.o.weight": "D (N H) -> N H D"},
        **_mlp("blocks", f"{decoder}.2", model.gated),
        "final_norm.scale": {"decoder.final_layer_norm.weight": "D -> D"},
        "head": {"lm_head.weight": "V D -> V D"},
    }


DEFAULTS = {
    "vocab_size": 32128, "d_model": 512, "d_kv": 64, "d_ff": 2048, "num_layers": 6,
    "num_decoder_layers": Nullable(int), "num_heads": 8, "relative_attention_num_buckets": 32,
    "relative_attention_max_distance": 128, "dropout_rate": 0.1, "layer_norm_epsilon": 1e-6,
    "feed_forward_proj": "relu", "dense_act_fn": Nullable(str), "is_gated_act": Nullable(bool), "is_decoder": False,
    "tie_word_embeddings": Nullable(bool, True), "scale_decoder_outputs": True,
    "n_positions": 512,  # which transformers does not ask for: relative positions know no longest sequence
}  # fmt: skip
ALIASES = {
    "hidden_size": "d_model",
    "num_attention_heads": "num_heads",
    "num_hidden_layers": "num_layers",
    "head_dim": "d_kv",
}


def read(settings: Settings) -> ModelConfig:
    """From config.json. What 1.1 says with tie_word_embeddings, newer files say with scale_decoder_outputs."""
    settings.only("is_decoder", False)
    activation = settings.choose("feed_forward_proj", FEED_FORWARD)
    for key, value in _parts(activation).items():  # transformers writes them, and believes them more than the whole
        settings.only(key, None, value)
    older, newer = settings.get("tie_word_embeddings"), settings["scale_decoder_outputs"]
    tied = newer if "scale_decoder_outputs" in settings.values else older is not False
    layers = settings["num_layers"]
    return ModelConfig(
        family="t5",
        num_layers=settings.get("num_decoder_layers") or layers,
        encoder_layers=layers,
        hidden_size=settings["d_model"],
        num_heads=settings["num_heads"],
        head_dim=settings["d_kv"],
        ffn_hidden_size=settings["d_ff"],
        max_positions=settings["n_positions"],
        vocab_size=settings["vocab_size"],
        positions="relative",
        relative_buckets=settings["relative_attention_num_buckets"],
        relative_max_distance=settings["relative_attention_max_distance"],
        attention_scale=1.0,
        norm="rmsnorm",
        norm_eps=settings["layer_norm_epsilon"],
        activation=activation,
        bias=False,
        tied_head=tied,
        hidden_dropout=settings["dropout_rate"],
        attention_dropout=settings["dropout_rate"],
    )


def _parts(activation: Activation) -> dict[str, Any]:
    """What newer files say of the non-linearity beside its whole name."""
    functions = {"relu": "relu", "geglu": "gelu_new", "swiglu": "silu"}
    return {"dense_act_fn": functions.get(activation, ""), "is_gated_act": activation != "relu"}


def write(model: ModelConfig) -> dict[str, Any]:
    """To config.json."""
    names = {ours: theirs for theirs, ours in FEED_FORWARD.items()}
    return {
        "is_encoder_decoder": True,
        "num_layers": model.encoder_layers or model.num_layers,
        "num_decoder_layers": model.num_layers,
        "d_model": model.hidden_size,
        "num_heads": model.num_heads,
        "d_kv": model.head_size,
        "d_ff": model.ffn_size,
        "n_positions": model.max_positions,
        "vocab_size": model.vocab_size,
        "relative_attention_num_buckets": model.relative_buckets,
        "relative_attention_max_distance": model.relative_max_distance,
        "layer_norm_epsilon": model.norm_eps,
        "feed_forward_proj": names.get(model.activation, ""),
        **_parts(model.activation),
        "tie_word_embeddings": model.tied_head,
        "scale_decoder_outputs": model.tied_head,
        "dropout_rate": model.hidden_dropout,
    }


T5 = Family(
    model_type="t5",
    architecture=lambda _: "T5ForConditionalGeneration",
    defaults=DEFAULTS,
    aliases=ALIASES,
    read=read,
    write=write,
    table=table,
    prefix="",
    heads=frozenset(),
    twins={
        "encoder.embed_tokens.weight": "shared.weight",
        "decoder.embed_tokens.weight": "shared.weight",
        "lm_head.weight": "shared.weight",
    },
)
