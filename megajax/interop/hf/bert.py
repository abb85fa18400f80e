"""BERT and RoBERTa: norms after the sums, and what of the heads a file has.

A file with a pooler is a model of pairs: it learnt which part of a pair comes first, or may learn it here.
"""

from __future__ import annotations

from typing import Any

from megajax.config.model import ModelConfig
from megajax.interop.hf.family import Family, Table
from megajax.interop.hf.settings import ACTIVATIONS, Settings, activation_name


def encoder_table(encoder: str, attention_norm: str, mlp_norm: str) -> Table:
    """The rows of an encoder and its pooler.

    Args:
        encoder: what its names begin with.
        attention_norm: name of the norm of the attention, within a layer.
        mlp_norm: name of that of the MLP.
    """
    layer = f"{encoder}.encoder.layer.{{layer}}"
    embedding, attention = f"{encoder}.embeddings", f"{layer}.attention"
    return {
        "word_embedding": {f"{embedding}.word_embeddings.weight": "V D -> V D"},
        "position_embedding": {f"{embedding}.position_embeddings.weight": "P D -> P D"},
        "token_type_embedding": {f"{embedding}.token_type_embeddings.weight": "T D -> T D"},
        "embedding_norm.scale": {f"{embedding}.LayerNorm.weight": "D -> D"},
        "embedding_norm.bias": {f"{embedding}.LayerNorm.bias": "D -> D"},
        "blocks.attention_norm.scale": {f"{layer}.{attention_norm}.weight": "D -> D"},
        "blocks.attention_norm.bias": {f"{layer}.{attention_norm}.bias": "D -> D"},
        "blocks.attention.qkv": {
            f"{attention}.self.query.weight": "(K G H) D -> D K G H",
            f"{attention}.self.key.weight": "(K H) D -> D K 1 H",
            f"{attention}.self.value.weight": "(K H) D -> D K 1 H",
        },
        "blocks.attention.qkv_bias": {
            f"{attention}.self.query.bias": "(K G H) -> K G H",
            f"{attention}.self.key.bias": "(K H) -> K 1 H",
            f"{attention}.self.value.bias": "(K H) -> K 1 H",
        },
        "blocks.attention.out": {f"{attention}.output.dense.weight": "D (N H) -> N H D"},
        "blocks.attention.out_bias": {f"{attention}.output.dense.bias": "D -> D"},
        "blocks.mlp_norm.scale": {f"{layer}.{mlp_norm}.weight": "D -> D"},
        "blocks.mlp_norm.bias": {f"{layer}.{mlp_norm}.bias": "D -> D"},
        "blocks.mlp.fc1": {f"{layer}.intermediate.dense.weight": "F D -> D 1 F"},
        "blocks.mlp.fc1_bias": {f"{layer}.intermediate.dense.bias": "F -> 1 F"},
        "blocks.mlp.fc2": {f"{layer}.output.dense.weight": "D F -> F D"},
        "blocks.mlp.fc2_bias": {f"{layer}.output.dense.bias": "D -> D"},
        "final_norm.scale": {f"{encoder}.encoder.ln.weight": "D -> D"},
        "final_norm.bias": {f"{encoder}.encoder.ln.bias": "D -> D"},
        "pooler": {f"{encoder}.pooler.dense.weight": "C D -> D C"},
        "pooler_bias": {f"{encoder}.pooler.dense.bias": "D -> D"},
    }


PAIR_HEAD: Table = {
    "pair_head": {"cls.seq_relationship.weight": "2 D -> D 2"},
    "pair_bias": {"cls.seq_relationship.bias": "2 -> 2"},
}
BERT_HEADS: Table = {
    "transform": {"cls.predictions.transform.dense.weight": "C D -> D C"},
    "transform_bias": {"cls.predictions.transform.dense.bias": "D -> D"},
    "transform_norm.scale": {"cls.predictions.transform.LayerNorm.weight": "D -> D"},
    "transform_norm.bias": {"cls.predictions.transform.LayerNorm.bias": "D -> D"},
    "head_bias": {"cls.predictions.bias": "V -> V"},
    **PAIR_HEAD,
}
ROBERTA_HEADS: Table = {
    "transform": {"lm_head.dense.weight": "C D -> D C"},
    "transform_bias": {"lm_head.dense.bias": "D -> D"},
    "transform_norm.scale": {"lm_head.layer_norm.weight": "D -> D"},
    "transform_norm.bias": {"lm_head.layer_norm.bias": "D -> D"},
    "head_bias": {"lm_head.bias": "V -> V"},
    **PAIR_HEAD,  # RoBERTa has none: one that was trained here is kept under BERT's name
}
HEADS = frozenset(BERT_HEADS) | {"pooler", "pooler_bias"}
BERT_TWINS = {
    "cls.predictions.decoder.weight": "bert.embeddings.word_embeddings.weight",
    "cls.predictions.decoder.bias": "cls.predictions.bias",
}
ROBERTA_TWINS = {
    "lm_head.decoder.weight": "roberta.embeddings.word_embeddings.weight",
    "lm_head.decoder.bias": "lm_head.bias",
}
POST = ("attention.output.LayerNorm", "output.LayerNorm")
BERT_TABLE: Table = {**encoder_table("bert", *POST), **BERT_HEADS}
ROBERTA_TABLE: Table = {**encoder_table("roberta", *POST), **ROBERTA_HEADS}


DEFAULTS = {
    "vocab_size": 30522, "hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12,
    "intermediate_size": 3072, "hidden_act": "gelu", "hidden_dropout_prob": 0.1, "attention_probs_dropout_prob": 0.1,
    "max_position_embeddings": 512, "type_vocab_size": 2, "initializer_range": 0.02, "layer_norm_eps": 1e-12,
    "is_decoder": False, "add_cross_attention": False, "tie_word_embeddings": True,
    "position_embedding_type": "absolute",
}  # fmt: skip


def read_shape(settings: Settings) -> dict[str, Any]:
    """What all encoders have in common, as fields of a `ModelConfig`."""
    settings.only("is_decoder", False)
    settings.only("add_cross_attention", False)
    settings.only("position_embedding_type", "absolute")
    settings.only("tie_word_embeddings", True)
    return {
        "family": "bert",
        "num_layers": settings["num_hidden_layers"],
        "hidden_size": settings["hidden_size"],
        "num_heads": settings["num_attention_heads"],
        "ffn_hidden_size": settings["intermediate_size"],
        "max_positions": settings["max_position_embeddings"],
        "vocab_size": settings["vocab_size"],
        "token_types": settings["type_vocab_size"],
        "activation": settings.choose("hidden_act", ACTIVATIONS),
        "norm_eps": settings["layer_norm_eps"],
        "pair_task": settings.has("pooler.dense.weight"),
        "hidden_dropout": settings["hidden_dropout_prob"],
        "attention_dropout": settings["attention_probs_dropout_prob"],
        "init_std": settings["initializer_range"],
    }


def write_shape(model: ModelConfig) -> dict[str, Any]:
    """The inverse of `read_shape`."""
    return {
        "num_hidden_layers": model.num_layers,
        "hidden_size": model.hidden_size,
        "num_attention_heads": model.num_heads,
        "intermediate_size": model.ffn_size,
        "max_position_embeddings": model.position_rows,
        "vocab_size": model.vocab_size,
        "type_vocab_size": model.token_types,
        "hidden_act": activation_name(model),
        "layer_norm_eps": model.norm_eps,
        "hidden_dropout_prob": model.hidden_dropout,
        "attention_probs_dropout_prob": model.attention_dropout,
        "initializer_range": model.init_std,
    }


def read_bert(settings: Settings) -> ModelConfig:
    """From config.json."""
    return ModelConfig(**read_shape(settings), norm_placement="post", embedding_norm=True)


def read_roberta(settings: Settings) -> ModelConfig:
    """From config.json; positions are counted from behind that of padding, and the head knows one non-linearity."""
    settings.only("hidden_act", "gelu")
    shape = read_shape(settings)
    offset = settings["pad_token_id"] + 1
    shape["max_positions"] -= offset
    return ModelConfig(**shape, norm_placement="post", embedding_norm=True, position_offset=offset)


def write_roberta(model: ModelConfig) -> dict[str, Any]:
    """To config.json."""
    return {**write_shape(model), "pad_token_id": model.position_offset - 1}


BERT = Family(
    model_type="bert",
    architecture=lambda model: "BertForPreTraining" if model.pair_task else "BertForMaskedLM",
    defaults=DEFAULTS,
    read=read_bert,
    write=write_shape,
    table=lambda _: BERT_TABLE,
    prefix="bert.",
    heads=HEADS,
    twins=BERT_TWINS,
)
ROBERTA = Family(
    model_type="roberta",
    architecture=lambda _: "RobertaForMaskedLM",
    defaults=DEFAULTS | {"vocab_size": 50265, "pad_token_id": 1},
    read=read_roberta,
    write=write_roberta,
    table=lambda _: ROBERTA_TABLE,
    prefix="roberta.",
    heads=HEADS,
    twins=ROBERTA_TWINS,
)
