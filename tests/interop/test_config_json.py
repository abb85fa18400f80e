"""config.json means the same to MegaJAX as to transformers, without any of its keys and after changes by a run."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

from megajax.config import InputError, ModelConfig
from megajax.interop.hf.families import family_of
from megajax.interop.hf.transfer import export_model, import_model
from megajax.models.layout import Layout
from tests.interop.imports import assert_same_outputs, imported_model
from tests.interop.test_conversion_cases import rewrite

pytestmark = pytest.mark.needs("torch", "transformers")

NAMES = [
    "gpt2-exact-gelu", "llama", "llama-biases", "llama-3.1", "mistral", "starcoder2", "nemotron", "nemotron-llama-3.1",
    "qwen2-window", "qwen3", "mixtral", "qwen2-moe", "qwen3-moe", "gemma2", "gemma3", "bloom", "bert", "megatron-bert",
    "roberta", "t5", "t5-1.1",
]  # fmt: skip


def described(settings: dict[str, Any], tensors: list[str]) -> ModelConfig | None:
    """The model with its defaults worked out; None where it is refused, by one line."""
    try:
        model = family_of(settings).described(settings, tensors)
    except InputError as error:
        assert "\n" not in str(error) and str(error).startswith("config.json")
        return None
    decoder = model.family == "t5" and model.num_layers
    return replace(
        model,
        num_kv_heads=model.kv_heads,
        head_dim=model.head_size,
        ffn_hidden_size=model.ffn_size,
        encoder_layers=model.encoder_layers or decoder or None,
    )


def unusual(key: str, value: Any) -> Any:
    """A number that is nobody's default."""
    return value * 1.25 + 0.015625 if isinstance(value, float) and key != "router_jitter_noise" else value


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_a_key_that_is_missing_or_null(name: str, tmp_path: Path) -> None:
    """Without each key in turn, the file reads as transformers completes it; null is refused, or means the same."""
    import transformers

    from tests.interop import references

    source = references.saved(references.reference(name), tmp_path / "source")
    file, tensors = source / "config.json", list(load_file(source / "model.safetensors"))
    written = json.loads(file.read_text())
    settings = {key: unusual(key, value) for key, value in written.items()}
    whole = described(settings, tensors)
    assert whole is not None
    changed = 0
    for key in settings.keys() - {"model_type", "architectures", "transformers_version"}:
        without = {other: value for other, value in settings.items() if other != key}
        for shorter in (without, without | {key: None}):
            file.write_text(json.dumps(shorter))
            ours = described(shorter, tensors)
            try:
                completed = transformers.AutoConfig.from_pretrained(source).to_dict()
            except Exception:  # a value that its own checks refuse
                continue
            if ours is not None or shorter is without:
                assert ours == described(completed, tensors), key
            changed += ours != whole
    assert changed > 5, "nothing depended on what was left out"


@pytest.mark.slow
def test_the_window_of_a_mistral_that_names_none(tmp_path: Path) -> None:
    """It is 4,096 tokens: with one layer, what comes behind them is computed without the first ones."""
    import torch
    import transformers

    from tests.interop import references

    config = transformers.MistralConfig(**references.GROUPED | {"num_hidden_layers": 1})
    model = references.randomized(transformers.MistralForCausalLM(config))
    source = references.saved(model, tmp_path / "source")
    rewrite(source / "config.json", sliding_window=None)
    assert "sliding_window" not in json.loads((source / "config.json").read_text())
    import_model(source, tmp_path / "run")
    ours = imported_model(tmp_path / "run")
    length = 4096 + 32
    tokens = np.random.default_rng(0).integers(3, references.V, (1, length), dtype=np.int32)
    with torch.no_grad():
        expected = model(torch.from_numpy(tokens).long()).logits[0, -32:].numpy()
    batch = {"tokens": jnp.asarray(tokens), "positions": jnp.arange(length)[None]}
    logits = ours.logits(ours.hidden(batch, ours.context(batch, Layout(), None))[:, -32:])[0]
    np.testing.assert_allclose(logits, expected, atol=1e-3 * np.abs(expected).max(), rtol=0)


def test_the_rotary_base_of_a_mixtral_that_names_none(tmp_path: Path) -> None:
    """It is 10^6, where its relatives have 10^4."""
    from tests.interop import references

    model = references.reference("mixtral")
    source = references.saved(model, tmp_path / "source")
    rewrite(source / "config.json", rope_parameters=None)
    import_model(source, tmp_path / "run")
    assert_same_outputs(model, imported_model(tmp_path / "run"))


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("gpt2", ["activation=relu"]),
        ("llama", ["rope_base=500"]),
        ("llama-3.1", ["rope_scaling_factor=2", "norm_eps=1e-2"]),
        ("mistral", ["window=3"]),
        ("nemotron", ["rope_fraction=0.25", "rope_base=500", "activation=gelu"]),
        ("qwen2", ["window=3"]),
        ("qwen2-moe", ["window=3", "router_renormalize=true"]),
        ("qwen3-moe", ["window=3", "experts_per_token=1"]),
        ("t5-1.1", ["activation=swiglu", "relative_max_distance=17"]),
    ],
)
def test_imported_then_changed(name: str, words: list[str], tmp_path: Path) -> None:
    """What the export computes in transformers is what the run computes."""
    from tests.interop import references

    model = references.reference(name)
    import_model(references.saved(model, tmp_path / "source"), tmp_path / "run", [f"model.{word}" for word in words])
    export_model(tmp_path / "run", tmp_path / "out")
    again, info = type(model).from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    ours = imported_model(tmp_path / "run")
    assert_same_outputs(again.eval(), ours)
    with pytest.raises(AssertionError):  # the model did change
        assert_same_outputs(model, ours)
