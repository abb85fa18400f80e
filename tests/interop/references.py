"""Small random models of transformers, one for every family and switch that MegaJAX imports, and their results."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

V, S = 50, 12
SHAPE: dict[str, Any] = {
    "vocab_size": V, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4,
    "max_position_embeddings": 32,
}  # fmt: skip
TOKENS = {"bos_token_id": 1, "eos_token_id": 2}
DECODER = SHAPE | TOKENS
GROUPED = DECODER | {"num_key_value_heads": 2, "rms_norm_eps": 1e-5}
MIXTURE = GROUPED | {"num_experts_per_tok": 2}
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 10_000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8,
}  # fmt: skip
GEMMA = GROUPED | {
    "num_hidden_layers": 5, "head_dim": 8, "query_pre_attn_scalar": 6, "sliding_window": 4,
    "final_logit_softcapping": 3.0,
}  # fmt: skip
QWEN_MOE = MIXTURE | {"num_experts": 4, "moe_intermediate_size": 12}
GPT2 = {"vocab_size": V, "n_embd": 8, "n_layer": 2, "n_head": 2, "n_positions": 16, **TOKENS}
T5 = {"vocab_size": V, "d_model": 16, "d_kv": 4, "d_ff": 24, "num_layers": 1, "num_decoder_layers": 2, "num_heads": 4}

t = transformers
MODELS: dict[str, Callable[[], Any]] = {
    "gpt2": lambda: t.GPT2LMHeadModel(t.GPT2Config(**GPT2)),
    "gpt2-exact-gelu": lambda: t.GPT2LMHeadModel(t.GPT2Config(**GPT2, n_inner=20, activation_function="gelu")),
    "gpt2-without-head": lambda: t.GPT2Model(t.GPT2Config(**GPT2)),
    "llama": lambda: t.LlamaForCausalLM(t.LlamaConfig(**GROUPED, head_dim=8)),
    "llama-tied": lambda: t.LlamaForCausalLM(t.LlamaConfig(**GROUPED, tie_word_embeddings=True)),
    "llama-biases": lambda: t.LlamaForCausalLM(t.LlamaConfig(**GROUPED, attention_bias=True, mlp_bias=True)),
    "llama-3.1": lambda: t.LlamaForCausalLM(t.LlamaConfig(**GROUPED, rope_parameters=LLAMA3)),
    "mistral": lambda: t.MistralForCausalLM(t.MistralConfig(**GROUPED, sliding_window=4)),
    "starcoder2": lambda: t.Starcoder2ForCausalLM(
        t.Starcoder2Config(**DECODER, num_key_value_heads=2, sliding_window=4)
    ),
    "nemotron": lambda: t.NemotronForCausalLM(t.NemotronConfig(**DECODER, num_key_value_heads=2, head_dim=8)),
    "nemotron-llama-3.1": lambda: t.NemotronForCausalLM(
        t.NemotronConfig(**DECODER, num_key_value_heads=4, rope_parameters=LLAMA3 | {"partial_rotary_factor": 1.0})
    ),
    "qwen2": lambda: t.Qwen2ForCausalLM(t.Qwen2Config(**GROUPED)),
    "qwen2-window": lambda: t.Qwen2ForCausalLM(
        t.Qwen2Config(**GROUPED, use_sliding_window=True, sliding_window=4, max_window_layers=0)
    ),
    "qwen3": lambda: t.Qwen3ForCausalLM(t.Qwen3Config(**GROUPED, head_dim=8)),
    "mixtral": lambda: t.MixtralForCausalLM(t.MixtralConfig(**MIXTURE, num_local_experts=4)),
    "qwen2-moe": lambda: t.Qwen2MoeForCausalLM(t.Qwen2MoeConfig(**QWEN_MOE, shared_expert_intermediate_size=20)),
    "qwen3-moe": lambda: t.Qwen3MoeForCausalLM(t.Qwen3MoeConfig(**QWEN_MOE, head_dim=8, norm_topk_prob=True)),
    "gemma2": lambda: t.Gemma2ForCausalLM(t.Gemma2Config(**GEMMA, attn_logit_softcapping=2.0)),
    "gemma3": lambda: t.Gemma3ForCausalLM(t.Gemma3TextConfig(**GEMMA | {"num_hidden_layers": 8})),
    "bloom": lambda: t.BloomForCausalLM(t.BloomConfig(vocab_size=V, hidden_size=16, n_layer=2, n_head=4, **TOKENS)),
    "bert": lambda: t.BertForPreTraining(t.BertConfig(**SHAPE)),
    "bert-without-pairs": lambda: t.BertForMaskedLM(t.BertConfig(**SHAPE, hidden_act="gelu_new")),
    "bert-without-heads": lambda: t.BertModel(t.BertConfig(**SHAPE)),
    "megatron-bert": lambda: t.MegatronBertForPreTraining(t.MegatronBertConfig(**SHAPE)),
    "roberta": lambda: t.RobertaForMaskedLM(t.RobertaConfig(**SHAPE, type_vocab_size=1, pad_token_id=1)),
    "t5": lambda: t.T5ForConditionalGeneration(t.T5Config(**T5)),
    "t5-1.1": lambda: untied(
        t.T5ForConditionalGeneration(t.T5Config(**T5, feed_forward_proj="gated-gelu", tie_word_embeddings=False))
    ),
}


def untied(model: Any) -> Any:
    """With a head of its own, as the released T5 1.1 has it; transformers 5 ties the two of every new T5."""
    model.config.tie_word_embeddings = False
    model.lm_head.weight = torch.nn.Parameter(torch.empty_like(model.shared.weight))
    return model


def reference(name: str) -> Any:
    """A model of the list."""
    return randomized(MODELS[name]())


def llama(kv_heads: int) -> Any:
    """With other key/value heads."""
    return randomized(t.LlamaForCausalLM(t.LlamaConfig(**GROUPED | {"num_key_value_heads": kv_heads})))


def randomized(model: Any) -> Any:
    """Every weight random: zero biases and gains of one would hide mistakes."""
    torch.manual_seed(0)
    with torch.no_grad():
        for key, weight in model.named_parameters():
            torch.nn.init.normal_(weight, std=0.3)
            if weight.ndim == 1 and key.endswith("weight"):
                weight.add_(1)
    return model.eval()


def saved(model: Any, directory: Path, **options: Any) -> Path:
    """The model as transformers writes it."""
    model.save_pretrained(directory, **options)
    return directory


def inputs(rows: int = 2) -> dict[str, np.ndarray]:
    """Tokens [B, S] of which the last row ends in padding, token types, and tokens of a decoder."""
    rng = np.random.default_rng(0)
    padding = np.zeros((rows, S), np.int32)
    padding[-1, S - 3 :] = 1
    return {
        "tokens": rng.integers(3, V, (rows, S), dtype=np.int32),
        "positions": np.broadcast_to(np.arange(S, dtype=np.int32), (rows, S)),
        "padding": padding,
        "token_types": rng.integers(0, 2, (rows, S), dtype=np.int32),
        "decoder_tokens": rng.integers(3, V, (rows, S - 2), dtype=np.int32),
    }


def computed(model: Any, given: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """What a model of transformers makes of `inputs`: logits, hidden states or scores of pairs."""
    arguments = {"input_ids": _tensor(given["tokens"])}
    config = model.config
    if config.model_type in ("bert", "megatron-bert", "roberta", "t5"):
        arguments["attention_mask"] = _tensor(1 - given["padding"])
    if getattr(config, "type_vocab_size", 1) > 1:
        arguments["token_type_ids"] = _tensor(given["token_types"])
    if config.model_type == "roberta":  # it counts positions from the tokens that are no padding
        arguments["position_ids"] = _tensor(given["positions"] + 2)
    if config.model_type == "t5":
        arguments["decoder_input_ids"] = _tensor(given["decoder_tokens"])
    with torch.no_grad():
        out = model(**arguments)
    names = ("logits", "prediction_logits", "seq_relationship_logits", "last_hidden_state")
    return {name: getattr(out, name).float().numpy() for name in names if getattr(out, name, None) is not None}


def _tensor(values: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(np.array(values, np.int64))
