"""Families of Hugging Face's encoders, and of T5, whose encoder has a decoder beside it.

BERT and RoBERTa have norms after the sums. Megatron-LM's BERT has them before the branches, and one after the last
block. A file with a pooler is a model of pairs: it learnt which part of a pair comes first, or may learn it here.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megajax.config.model import Activation, ModelConfig
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


def _encoder(encoder: str, attention_norm: str, mlp_norm: str) -> Table:
    """Return the rows of an encoder and its pooler.

    Args:
        encoder: prefix of the encoder's names.
        attention_norm: name of the norm of the attention, within a layer.
        mlp_norm: name of the norm of the MLP, within a layer.
    """
    layer = f"{encoder}.encoder.layer.{{layer}}"
    embedding, attention = f"{encoder}.embeddings", f"{layer}.attention"
    return {
        "word_embedding": {f"{embedding}.word_embeddings.weight": "V D -> V D"},
        "position_embedding": {f"{embedding}.position_embeddings.weight": "P D -> P D"},
        "token_type_embedding": {f"{embedding}.token_type_embeddings.weight": "T D -> T D"},
        **norm("embedding_norm", f"{embedding}.LayerNorm"),
        **norm("blocks.attention_norm", f"{layer}.{attention_norm}"),
        **projections("blocks.attention.qkv", *(f"{attention}.self.{name}" for name in ("query", "key", "value"))),
        **dense("blocks.attention.out", f"{attention}.output.dense", "D (N H) -> N H D", "D -> D"),
        **norm("blocks.mlp_norm", f"{layer}.{mlp_norm}"),
        **dense("blocks.mlp.fc1", f"{layer}.intermediate.dense", "F D -> D 1 F", "F -> 1 F"),
        **dense("blocks.mlp.fc2", f"{layer}.output.dense", "D F -> F D", "D -> D"),
        **norm("final_norm", f"{encoder}.encoder.ln"),
        **dense("pooler", f"{encoder}.pooler.dense", "C D -> D C", "D -> D"),
    }


def _heads(head: str, dense_layer: str, norm_layer: str) -> Table:
    """Return the rows of the heads for masked tokens, whose layers have these names, and for pairs.

    RoBERTa has no head for pairs: one that was trained here is kept under BERT's name.
    """
    return {
        **dense("transform", f"{head}.{dense_layer}", "C D -> D C", "D -> D"),
        **norm("transform_norm", f"{head}.{norm_layer}"),
        "head_bias": {f"{head}.bias": "V -> V"},
        "pair_head": {"cls.seq_relationship.weight": "2 D -> D 2"},
        "pair_bias": {"cls.seq_relationship.bias": "2 -> 2"},
    }


def _twins(encoder: str, head: str) -> dict[str, str]:
    """Return the copies of the embedding and of the bias that the head for masked tokens may hold."""
    table = f"{encoder}.embeddings.word_embeddings.weight"
    return {f"{head}.decoder.weight": table, f"{head}.decoder.bias": f"{head}.bias"}


_POST = ("attention.output.LayerNorm", "output.LayerNorm")
_BERT_HEADS = _heads("cls.predictions", "transform.dense", "transform.LayerNorm")
BERT_TABLE = {**_encoder("bert", *_POST), **_BERT_HEADS}
MEGATRON_BERT_TABLE = {**_encoder("bert", attention_norm="attention.ln", mlp_norm="ln"), **_BERT_HEADS}
ROBERTA_TABLE = {**_encoder("roberta", *_POST), **_heads("lm_head", "dense", "layer_norm")}
HEADS = frozenset(_BERT_HEADS) | {"pooler", "pooler_bias"}


SHAPE: Rows = (
    always(family="bert"),
    only("is_decoder", False),
    only("add_cross_attention", False),
    only("position_embedding_type", "absolute"),
    only("tie_word_embeddings", True),
    field("num_hidden_layers", "num_layers", 12),
    field("hidden_size", "hidden_size", 768),
    field("num_attention_heads", "num_heads", 12),
    field("intermediate_size", "ffn_hidden_size", 3072),
    field("max_position_embeddings", "max_positions", 512, written="position_rows"),
    field("vocab_size", "vocab_size", 30522),
    field("type_vocab_size", "token_types", 2),
    choice("hidden_act", "activation", "gelu", ACTIVATIONS),
    field("layer_norm_eps", "norm_eps", 1e-12),
    Row({}, lambda settings: {"pair_task": settings.has("pooler.dense.weight")}, lambda _: {}),
    field("hidden_dropout_prob", "hidden_dropout", 0.1),
    field("attention_probs_dropout_prob", "attention_dropout", 0.1),
    field("initializer_range", "init_std", 0.02),
)
"""Rows that all encoders have in common, with BERT's defaults."""
_NORMS_AFTER = always(norm_placement="post", embedding_norm=True)

BERT = Family(
    model_type="bert",
    architecture=lambda model: "BertForPreTraining" if model.pair_task else "BertForMaskedLM",
    rows=(*SHAPE, _NORMS_AFTER),
    table=lambda _: BERT_TABLE,
    prefix="bert.",
    heads=HEADS,
    twins=_twins("bert", "cls.predictions"),
)
MEGATRON_BERT = Family(
    model_type="megatron-bert",
    architecture=lambda model: "MegatronBertForPreTraining" if model.pair_task else "MegatronBertForMaskedLM",
    rows=with_defaults(
        SHAPE, vocab_size=29056, hidden_size=1024, num_hidden_layers=24, num_attention_heads=16, intermediate_size=4096
    ),
    table=lambda _: MEGATRON_BERT_TABLE,
    prefix="bert.",
    heads=HEADS,
    twins=_twins("bert", "cls.predictions"),
)


def _read_offset(settings: Settings) -> Mapping[str, Any]:
    """Count positions from behind that of padding; the table has rows for those before it as well."""
    offset = settings["pad_token_id"] + 1
    return {"position_offset": offset, "max_positions": settings["max_position_embeddings"] - offset}


ROBERTA = Family(
    model_type="roberta",
    architecture=lambda _: "RobertaForMaskedLM",
    rows=(
        only("hidden_act", "gelu"),  # the only one that its head knows
        *with_defaults(SHAPE, vocab_size=50265),
        _NORMS_AFTER,
        Row({"pad_token_id": 1}, _read_offset, lambda model: {"pad_token_id": model.position_offset - 1}),
    ),
    table=lambda _: ROBERTA_TABLE,
    prefix="roberta.",
    heads=HEADS,
    twins=_twins("roberta", "lm_head"),
)


def _t5_attention(ours: str, theirs: str) -> Table:
    """Return the rows of self-attention, which both stacks have first in a layer."""
    return {
        f"{ours}.attention_norm.scale": {f"{theirs}.layer_norm.weight": "D -> D"},
        **projections(f"{ours}.attention.qkv", *(f"{theirs}.SelfAttention.{name}" for name in "qkv"), bias=False),
        **dense(f"{ours}.attention.out", f"{theirs}.SelfAttention.o", "D (N H) -> N H D"),
    }


def _t5_mlp(ours: str, theirs: str, names: list[str]) -> Table:
    """Return the rows of the MLP of a layer, whose input matrices have these names."""
    return {
        f"{ours}.mlp_norm.scale": {f"{theirs}.layer_norm.weight": "D -> D"},
        **dense(f"{ours}.mlp.fc1", [f"{theirs}.DenseReluDense.{name}" for name in names], "F D -> D 1 F"),
        **dense(f"{ours}.mlp.fc2", f"{theirs}.DenseReluDense.wo", "D F -> F D"),
    }


def _t5_table(model: ModelConfig) -> Table:
    """Return all rows; the bias of relative positions lies in the first layer of a stack and serves all."""
    encoder, decoder = "encoder.block.{layer}.layer", "decoder.block.{layer}.layer"
    bias = "block.0.layer.0.SelfAttention.relative_attention_bias.weight"
    inputs = ["wi_0", "wi_1"] if model.gated else ["wi"]
    cross = f"{decoder}.1.EncDecAttention"
    return {
        "word_embedding": {"shared.weight": "V D -> V D"},
        "encoder_bias": {f"encoder.{bias}": "B N -> B N"},
        **_t5_attention("encoder_blocks", f"{encoder}.0"),
        **_t5_mlp("encoder_blocks", f"{encoder}.1", inputs),
        "encoder_norm.scale": {"encoder.final_layer_norm.weight": "D -> D"},
        "decoder_bias": {f"decoder.{bias}": "B N -> B N"},
        **_t5_attention("blocks", f"{decoder}.0"),
        "blocks.cross_norm.scale": {f"{decoder}.1.layer_norm.weight": "D -> D"},
        **dense("blocks.cross.q", f"{cross}.q", "(N H) D -> D N H"),
        **dense("blocks.cross.kv", (f"{cross}.k", f"{cross}.v"), "(N H) D -> D N 1 H"),
        **dense("blocks.cross.out", f"{cross}.o", "D (N H) -> N H D"),
        **_t5_mlp("blocks", f"{decoder}.2", inputs),
        "final_norm.scale": {"decoder.final_layer_norm.weight": "D -> D"},
        "head": {"lm_head.weight": "V D -> V D"},
    }


_FEED_FORWARD: dict[str, Activation] = {"relu": "relu", "gated-gelu": "geglu", "gated-silu": "swiglu"}
_FUNCTIONS = {"relu": "relu", "geglu": "gelu_new", "swiglu": "silu"}


def _read_parts(settings: Settings) -> Mapping[str, Any]:
    """Check what newer files say of the parts of the non-linearity, which transformers believes more than its name."""
    activation = settings.choose("feed_forward_proj", _FEED_FORWARD)
    settings.only("dense_act_fn", None, _FUNCTIONS[activation])
    settings.only("is_gated_act", None, activation != "relu")
    return {"activation": activation}


def _write_parts(model: ModelConfig) -> Mapping[str, Any]:
    return {"dense_act_fn": _FUNCTIONS.get(model.activation, ""), "is_gated_act": model.activation != "relu"}


def _read_tied(settings: Settings) -> Mapping[str, Any]:
    """Read whether the head is tied; newer files say it with scale_decoder_outputs, 1.1 with the older key."""
    older, newer = settings.get("tie_word_embeddings"), settings["scale_decoder_outputs"]
    return {"tied_head": newer if "scale_decoder_outputs" in settings.values else older is not False}


def _read_depths(settings: Settings) -> Mapping[str, Any]:
    """Read how many layers the stacks have; the decoder is as deep as the encoder unless the file says more."""
    decoder, encoder = settings.get("num_decoder_layers"), settings["num_layers"]
    return {"num_layers": decoder or encoder, "encoder_layers": encoder}


T5 = Family(
    model_type="t5",
    architecture=lambda _: "T5ForConditionalGeneration",
    rows=(
        always(family="t5", positions="relative", attention_scale=1.0, norm="rmsnorm", bias=False),
        told("is_encoder_decoder", lambda _: True),
        only("is_decoder", False),
        choice("feed_forward_proj", "activation", "relu", _FEED_FORWARD),
        Row({"dense_act_fn": Nullable(str), "is_gated_act": Nullable(bool)}, _read_parts, _write_parts),
        Row(
            {"tie_word_embeddings": Nullable(bool, True), "scale_decoder_outputs": True},
            _read_tied,
            lambda model: dict.fromkeys(("tie_word_embeddings", "scale_decoder_outputs"), model.tied_head),
        ),
        Row(
            {"num_layers": 6, "num_decoder_layers": Nullable(int)},
            _read_depths,
            lambda model: {
                "num_layers": model.encoder_layers or model.num_layers,
                "num_decoder_layers": model.num_layers,
            },
            {"num_hidden_layers": "num_layers"},
        ),
        field("d_model", "hidden_size", 512, "hidden_size"),
        field("num_heads", "num_heads", 8, "num_attention_heads"),
        field("d_kv", "head_dim", 64, "head_dim"),
        field("d_ff", "ffn_hidden_size", 2048),
        field("n_positions", "max_positions", 512),  # transformers asks not: relative positions know no longest text
        field("vocab_size", "vocab_size", 32128),
        field("relative_attention_num_buckets", "relative_buckets", 32),
        field("relative_attention_max_distance", "relative_max_distance", 128),
        field("layer_norm_epsilon", "norm_eps", 1e-6),
        field("dropout_rate", "attention_dropout", 0.1),
        field("dropout_rate", "hidden_dropout", 0.1),  # the one of the two that is written
    ),
    table=_t5_table,
    prefix="",
    heads=frozenset(),
    twins=dict.fromkeys(
        ("encoder.embed_tokens.weight", "decoder.embed_tokens.weight", "lm_head.weight"), "shared.weight"
    ),
)
ENCODERS = (BERT, MEGATRON_BERT, ROBERTA, T5)
