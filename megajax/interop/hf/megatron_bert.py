"""Megatron-LM's BERT as Hugging Face has it: norms before the branches, and one after the last block."""

from __future__ import annotations

from megajax.config.model import ModelConfig
from megajax.interop.hf.bert import BERT_HEADS, BERT_TWINS, DEFAULTS, HEADS, encoder_table, read_shape, write_shape
from megajax.interop.hf.family import Family, Table
from megajax.interop.hf.settings import Settings

TABLE: Table = {**encoder_table("bert", attention_norm="attention.ln", mlp_norm="ln"), **BERT_HEADS}

SIZES = {
    "vocab_size": 29056,
    "hidden_size": 1024,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "intermediate_size": 4096,
}


def read(settings: Settings) -> ModelConfig:
    """From config.json."""
    return ModelConfig(**read_shape(settings))


MEGATRON_BERT = Family(
    model_type="megatron-bert",
    architecture=lambda model: "MegatronBertForPreTraining" if model.pair_task else "MegatronBertForMaskedLM",
    defaults=DEFAULTS | SIZES,
    read=read,
    write=write_shape,
    table=lambda _: TABLE,
    prefix="bert.",
    heads=HEADS,
    twins=BERT_TWINS,
)
