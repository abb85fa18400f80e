"""Cases that have gone wrong in other projects: grouped heads, dtypes, shards, padded vocabularies, rotary layouts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from megajax.checkpoint.store import Checkpoints
from megajax.config import CheckpointConfig, ModelConfig, dump_config, load_config
from megajax.inference.trained import load_model
from megajax.interop.hf.transfer import export_model, import_model
from megajax.models.parameters import named_leaves
from tests.interop.imports import assert_same_outputs, imported_model, in_layers, trained
from tests.made_runs import make_run

pytestmark = pytest.mark.needs("torch", "transformers")


def rewrite(path: Path, **changes: Any) -> None:
    """Change a config.json; None takes a key away."""
    settings = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({key: value for key, value in settings.items() if value is not None}))


@pytest.mark.parametrize("kv_heads", [4, None, 2, 1])
def test_key_value_heads(kv_heads: int | None, tmp_path: Path) -> None:
    """As many as query heads, said or not; two; one."""
    from tests.interop import references

    model = references.llama(kv_heads or 4)
    source = references.saved(model, tmp_path / "source")
    rewrite(source / "config.json", num_key_value_heads=kv_heads)
    import_model(source, tmp_path / "run")
    ours = imported_model(tmp_path / "run")
    assert_same_outputs(model, ours)
    assert ours.blocks.attention.qkv.shape == (2, 16, kv_heads or 4, 4 // (kv_heads or 4) + 2, 4)
    for name, leaf in named_leaves(ours):
        for layer in in_layers(name, leaf):
            assert layer.any(), name


@pytest.mark.parametrize(("largest", "count"), [("9KB", 2), ("1GB", 1)])
def test_dtypes_and_shards_come_back(largest: str, count: int, tmp_path: Path) -> None:
    """Bf16 in two files, or one, is again what it was, names, config and index included."""
    import torch

    from tests.interop import references

    model = references.reference("llama").to(torch.bfloat16)
    source = references.saved(model, tmp_path / "source", max_shard_size=largest)
    import_model(source, tmp_path / "run")
    export_model(tmp_path / "run", tmp_path / "out")
    files = sorted(path.name for path in source.iterdir() if path.suffix in (".safetensors", ".json"))
    assert len([file for file in files if file.endswith("safetensors")]) == count
    assert json.loads((tmp_path / "out/config.json").read_text())["dtype"] == "bfloat16"
    for file in files:
        assert (tmp_path / "out" / file).read_bytes() == (source / file).read_bytes(), file
    again, info = type(model).from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"] and again.dtype == torch.bfloat16


def test_interleaved_rotary_layout(tmp_path: Path) -> None:
    """The same model with the rows of every query and key head in the order of LLaMA's first release."""
    from tests.interop import references

    model = references.reference("llama")  # head dim 8
    source = references.saved(model, tmp_path / "source")
    tensors = load_file(source / "model.safetensors")
    for name in [name for name in tensors if "q_proj" in name or "k_proj" in name]:
        heads = tensors[name].reshape(-1, 8, 16)
        tensors[name] = np.ascontiguousarray(heads[:, [0, 4, 1, 5, 2, 6, 3, 7]]).reshape(tensors[name].shape)
    save_file(tensors, source / "model.safetensors", {"format": "pt"})

    import_model(source, tmp_path / "run", interleaved_rope=True)
    assert_same_outputs(model, imported_model(tmp_path / "run"))
    export_model(tmp_path / "run", tmp_path / "out")
    for name, value in load_file(tmp_path / "out" / "model.safetensors").items():
        np.testing.assert_array_equal(value, tensors[name], err_msg=name)
    import_model(source, tmp_path / "wrong")
    with pytest.raises(AssertionError):
        assert_same_outputs(model, imported_model(tmp_path / "wrong"))


@pytest.mark.slow
@pytest.mark.parametrize("tied", [True, False])
def test_a_run_that_began_here_is_exported_without_its_padding(tied: bool, tmp_path: Path) -> None:
    """50,257 words were trained as 50,304 rows."""
    import transformers

    words = [
        "model.num_layers=1", "model.hidden_size=8", "model.num_heads=2", "model.max_positions=16",
        "model.vocab_size=50257", f"model.tied_head={tied}", "tokenizer.vocab_size=50256", "data.seq_length=16",
    ]  # fmt: skip
    config = load_config(None, words).config
    model = trained(config.model)
    assert model.word_embedding.shape == (50304, 8)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.yaml").write_text(dump_config(config))
    with Checkpoints(tmp_path / "run" / "checkpoints", CheckpointConfig()) as checkpoints:
        checkpoints.save(3, {"params": model}, {"step": 3, "tokenizer": {"type": "null", "vocab_size": 50257}})

    export_model(tmp_path / "run", tmp_path / "out")
    settings = json.loads((tmp_path / "out" / "config.json").read_text())
    assert (settings["model_type"], settings["vocab_size"]) == ("gpt2", 50257)
    exported, info = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"] and not info["mismatched_keys"]
    assert exported.transformer.wte.weight.shape == exported.lm_head.weight.shape == (50257, 8)
    assert (exported.lm_head.weight is exported.transformer.wte.weight) == tied
    assert_same_outputs(exported.eval(), model)


@pytest.mark.slow
def test_heads_that_were_drawn_go_out_once_they_are_trained(tmp_path: Path) -> None:
    """An encoder without heads, imported with new ones: what training made of them is in the export."""
    import transformers

    from tests.interop import references

    source = references.saved(references.reference("bert-without-heads"), tmp_path / "source")
    import_model(source, tmp_path / "run", draw_heads=True)
    config = load_config(tmp_path / "run/config.yaml").config
    model = trained(config.model)
    with Checkpoints(tmp_path / "run/checkpoints", CheckpointConfig()) as checkpoints:
        checkpoints.save(3, {"params": model}, {"step": 3, "tokenizer": {"type": "null", "vocab_size": 50}})
    export_model(tmp_path / "run", tmp_path / "out")
    assert json.loads((tmp_path / "out/config.json").read_text())["architectures"] == ["BertForPreTraining"]
    exported, info = transformers.BertForPreTraining.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    assert_same_outputs(exported.eval(), model)


def test_a_t5_that_began_here_says_what_its_decoder_begins_with(tmp_path: Path) -> None:
    """transformers generates with it, from the token with which it was trained."""
    import torch
    import transformers

    shape = ModelConfig(
        family="t5", num_layers=1, hidden_size=16, num_heads=2, positions="relative", norm="rmsnorm", bias=False,
        activation="relu", attention_scale=1.0, max_positions=32, ffn_hidden_size=32, vocab_multiple=1,
    )  # fmt: skip
    run = make_run(tmp_path / "run", ["a text of a few words", "and another one"] * 20, model=shape, vocab_size=290)
    export_model(run, tmp_path / "out")
    first = json.loads((tmp_path / "out/config.json").read_text())["decoder_start_token_id"]
    assert first == load_model(run).first_token
    exported = transformers.AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "out")
    made = exported.generate(torch.tensor([[5, 6, 7]]), max_new_tokens=2, do_sample=False)
    assert made[0, 0] == first
