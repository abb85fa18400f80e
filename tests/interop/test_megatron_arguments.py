"""Arguments of Megatron-LM that change the maths are honoured or refused: logits equal its decoder's in NumPy."""

from __future__ import annotations

from argparse import Namespace
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flax import nnx

from megajax.config import InputError
from megajax.convert import main
from megajax.inference.trained import load_model
from megajax.interop.megatron.arguments import read_architecture
from megajax.models.layout import Layout
from tests.interop import megatron_reference as reference
from tests.models.tiny import batch_of

GPT: dict[str, Any] = {
    "num_layers": 2, "hidden_size": 16, "num_attention_heads": 4, "kv_channels": 4, "ffn_hidden_size": 24,
    "max_position_embeddings": 16, "seq_length": 12, "padded_vocab_size": 32, "normalization": "LayerNorm",
    "norm_epsilon": 1e-5, "position_embedding_type": "learned_absolute",
}  # fmt: skip
LLAMA: dict[str, Any] = GPT | {
    "group_query_attention": True, "num_query_groups": 2, "normalization": "RMSNorm", "swiglu": True,
    "position_embedding_type": "rope", "add_bias_linear": False, "untie_embeddings_and_output_weights": True,
}  # fmt: skip
NEUTRAL: dict[str, Any] = {
    "apply_query_key_layer_scaling": True, "attention_softmax_in_fp32": True, "bf16": True, "lr": 3e-4, "rank": 0,
    "tensor_model_parallel_size": 8, "recompute_granularity": "full", "moe_token_drop_policy": "probs", "fp8": "hybrid",
    "qk_head_dim": 128, "save": "/here", "rl_default_temperature": 1.0, "transformer_impl": "local", "mscale": 1.0,
    "tokenizer_type": "GPT2BPETokenizer", "adam_beta2": 0.95, "vision_backbone_type": "vit", "masked_softmax_fusion": 1,
}  # fmt: skip


def save(folder: Path, args: dict[str, Any], tensors: reference.Tensors) -> Path:
    """A checkpoint of one rank."""
    import torch

    rank = folder / "iter_0000001" / "mp_rank_00"
    rank.mkdir(parents=True)
    weights = {name: torch.tensor(x) for name, x in tensors.items()}
    contents = {"args": Namespace(**args), "checkpoint_version": 3.0, "model": weights}
    torch.save(contents, rank / "model_optim_rng.pt")
    (folder / "latest_checkpointed_iteration.txt").write_text("1")
    return folder


MIXTURE: dict[str, Any] = LLAMA | {
    "num_experts": 4, "moe_ffn_hidden_size": 12, "moe_router_topk": 2, "moe_grouped_gemm": True,
    "moe_router_load_balancing_type": "aux_loss", "moe_aux_loss_coeff": 1e-2, "moe_token_dispatcher_type": "alltoall",
}  # fmt: skip
CASES: dict[str, dict[str, Any]] = {
    "layernorm_1p": GPT | {"apply_layernorm_1p": True, "norm_epsilon": 1e-2} | NEUTRAL,
    "exact_gelu": GPT | {"bias_gelu_fusion": False, "softmax_scale": 0.8},
    "no_bias": GPT | {"layernorm_zero_centered_gamma": False, "add_bias_linear": False},
    "nemotron": GPT | {
        "squared_relu": True, "apply_layernorm_1p": True, "position_embedding_type": "rope", "rotary_percent": 0.5,
        "add_bias_linear": False, "untie_embeddings_and_output_weights": True, "kv_channels": 8,
    },
    "rmsnorm_1p_interleaved_interpolated": LLAMA | {
        "apply_layernorm_1p": True, "qk_layernorm": True, "rotary_interleaved": True, "rotary_percent": 0.5,
        "rotary_seq_len_interpolation_factor": 3, "add_qkv_bias": True, "kv_channels": 8,
    },
    "scaled_rope_window": LLAMA | {
        "use_rope_scaling": True, "rope_scaling_factor": 4.0, "window_size": (3, 0), "kv_channels": 8,
        "window_attn_skip_freq": [1, 1], "rotary_base": 500_000,
        "max_position_embeddings": 4096, "layernorm_zero_centered_gamma": True,
    },
    "mixture": MIXTURE,
    "pre_softmax_shared": MIXTURE | {
        "moe_router_pre_softmax": True, "moe_shared_expert_intermediate_size": 20, "moe_shared_expert_gate": True,
        "apply_layernorm_1p": True,
    },
}  # fmt: skip
SWITCHES = (
    "apply_layernorm_1p", "squared_relu", "bias_gelu_fusion", "softmax_scale", "rotary_interleaved", "rotary_percent",
    "rotary_base", "rotary_seq_len_interpolation_factor", "use_rope_scaling", "window_size", "moe_router_pre_softmax",
)  # fmt: skip
"""What changes the logits and nothing of the tensors."""


@pytest.mark.needs("torch")
@pytest.mark.parametrize("case", CASES)
def test_logits_are_those_of_megatron(tmp_path: Path, case: str) -> None:
    args = CASES[case]
    tensors, tokens = reference.random_tensors(args), np.random.default_rng(1).integers(0, 32, 12).astype(np.int32)
    source = save(tmp_path / "megatron", args, tensors)
    assert main(["import", str(source), "--out", str(tmp_path / "run"), "tokenizer.vocab_size=31"]) == 0
    model, batch = load_model(tmp_path / "run").model, batch_of(tokens[None])
    found = model.logits(model.hidden(batch, model.context(batch, Layout(), None)))[0]
    known = dict(args)
    if known.pop("layernorm_zero_centered_gamma", False):  # the newest name of the same switch
        known["apply_layernorm_1p"] = True
    expected = reference.logits(known, tensors, tokens)
    np.testing.assert_allclose(found, expected, rtol=0, atol=5e-5)
    for switch in known.keys() & set(SWITCHES):
        without = {name: value for name, value in known.items() if name != switch}
        difference = np.abs(reference.logits(without, tensors, tokens) - expected).max()
        assert difference > 1e-4, f"{switch} is not tested"


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"multi_latent_attention": True, "kv_lora_rank": 512}, "args.multi_latent_attention"),
        ({"window_size": (3, 0), "window_attn_skip_freq": 2}, "args.window_attn_skip_freq 2"),
        ({"no_rope_freq": [0, 1], "position_embedding_type": "rope"}, r"args.no_rope_freq \[0, 1\]"),
        ({"no_rope_freq": 4, "position_embedding_type": "rope"}, "args.no_rope_freq 4"),
        ({"quick_geglu": True}, "args.quick_geglu"),
        ({"softmax_type": "learnable"}, "args.softmax_type learnable"),
        ({"normalization": "L2Norm"}, "args.normalization L2Norm"),
        ({"openai_gelu": True, "bias_gelu_fusion": False}, "args.openai_gelu"),
        (MIXTURE | {"add_bias_linear": True}, "args.num_experts with args.add_bias_linear"),
        (MIXTURE | {"moe_router_enable_expert_bias": True}, "args.moe_router_enable_expert_bias"),
        (MIXTURE | {"moe_layer_freq": [0, 1]}, r"args.moe_layer_freq \[0, 1\]"),
        (MIXTURE | {"moe_router_load_balancing_type": "sinkhorn"}, "moe_router_load_balancing_type sinkhorn"),
        (MIXTURE | {"moe_router_score_function": "sigmoid"}, "args.moe_router_score_function sigmoid"),
        ({"position_embedding_type": "yarn"}, "args.position_embedding_type yarn"),
        ({"hidden_size": None}, "the checkpoint's args lack hidden_size"),
        ({"num_layers": -1}, "the checkpoint's args give model.num_layers = -1: Input should be greater than 0"),
        ({"residual_gain": 2, "z": [1]}, r"residual_gain = 2, args.z = \[1\] .* --ignore-args residual_gain,z"),
    ],
)
def test_what_has_no_counterpart_is_named(given: dict[str, Any], named: str) -> None:
    with pytest.raises(InputError, match=named):
        read_architecture(Namespace(**GPT | given))


def test_unknown_arguments_that_are_unset_or_ignored_are_accepted() -> None:
    unset = dict.fromkeys(("new_switch", "new_list", "new_number"), None) | {"other": False, "third": [], "more": 0}
    assert read_architecture(Namespace(**GPT | unset)) == read_architecture(Namespace(**GPT))
    assert read_architecture(Namespace(**GPT | {"residual_gain": 2}), ["residual_gain"]).model.num_layers == 2


def test_the_first_versions_had_other_names() -> None:
    """Rotary positions were a switch beside the learned table; GQA and epsilon had names of their own."""
    old = {name: value for name, value in GPT.items() if name not in ("position_embedding_type", "norm_epsilon")}
    model = read_architecture(Namespace(**old, use_rotary_position_embeddings=True, layernorm_epsilon=1e-3)).model
    assert (model.positions, model.norm_eps, model.num_kv_heads) == ("rope", 1e-3, None)
    assert read_architecture(Namespace(**old, add_position_embedding=False)).model.positions == "none"


@pytest.mark.needs("torch")
@pytest.mark.parametrize("old", [False, True], ids=["core", "first names"])
def test_bert_comes_in_with_its_heads(tmp_path: Path, capsys: pytest.CaptureFixture[str], old: bool) -> None:
    """The layers' GELU is the tanh form, that of the head for masked tokens the exact one."""
    shape = GPT | {"bert": True, "bert_binary_head": True}
    tensors = reference.random_tensors(shape)
    args = {name: value for name, value in shape.items() if name != "bert"}
    names = {"decoder.": "encoder."}
    if old:
        names = {"decoder.": "language_model.encoder.", "embedding.": "language_model.embedding."}
        names |= {"pooler.": "language_model.pooler.", "lm_head.layer_norm": "lm_head.layernorm"}
        names |= {"output_layer.bias": "lm_head.bias"}
    stored = {}
    for name, x in tensors.items():
        begin = next((begin for begin in names if name.startswith(begin)), "")
        stored[names.get(begin, "") + name.removeprefix(begin)] = x
    source = save(tmp_path / "megatron", args, stored)
    assert main(["import", str(source), "--out", str(tmp_path / "run"), "tokenizer.vocab_size=31"]) == 0
    model = load_model(tmp_path / "run").model
    rng = np.random.default_rng(1)
    tokens, types = rng.integers(0, 32, 12).astype(np.int32), np.repeat([0, 1], 6).astype(np.int32)
    batch = batch_of(tokens[None], token_types=types[None])
    hidden = model.hidden(batch, model.context(batch, Layout(), None))
    masked, pair = reference.bert_logits(shape, tensors, tokens, types)
    np.testing.assert_allclose(model.logits(hidden)[0], masked, rtol=0, atol=5e-5)
    np.testing.assert_allclose(model.pair_logits(hidden, Layout())[0], pair, rtol=0, atol=5e-5)
    model.config = nnx.static(replace(model.config, head_activation=None))
    assert not np.allclose(model.logits(hidden)[0], masked, rtol=0, atol=5e-5)
    assert main(["export", str(tmp_path / "run"), "--out", str(tmp_path / "hf")]) == 2
    assert "head_activation" in capsys.readouterr().err


@pytest.mark.needs("torch")
def test_t5_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tensors = reference.random_tensors(GPT)
    more = {"decoder.layers.0.cross_attention.linear_q.weight": np.zeros((16, 16), np.float32)}
    source = save(tmp_path / "megatron", GPT, tensors | more)
    assert main(["import", str(source), "--out", str(tmp_path / "run"), "tokenizer.vocab_size=31"]) == 2
    assert "cross_attention.linear_q.weight, which has no counterpart here: of T5" in capsys.readouterr().err


@pytest.mark.needs("torch")
def test_a_tensor_of_another_shape_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Rows of queries, keys and values that no number of heads divides are told as well, before they are laid out."""
    tensors = reference.random_tensors(GPT)
    name = "decoder.layers.1.self_attention.linear_qkv.weight"
    source = save(tmp_path / "megatron", GPT, tensors | {name: tensors[name][:-1]})
    assert main(["import", str(source), "--out", str(tmp_path / "run"), "tokenizer.vocab_size=31"]) == 2
    said = "blocks.attention.qkv has shape (47, 16), the model of its args (48, 16)"
    assert said in capsys.readouterr().err and not (tmp_path / "run").exists()
