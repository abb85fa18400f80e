"""In every family, a random model of transformers is imported, computes the same, and is exported to the same files."""

from __future__ import annotations

from pathlib import Path

import pytest

from megajax.interop.hf.transfer import export_model, import_model
from tests.interop.imports import assert_same_outputs, imported_model

pytestmark = pytest.mark.needs("torch", "transformers")

NAMES = [
    "gpt2", "gpt2-exact-gelu", "gpt2-without-head", "llama", "llama-tied", "llama-biases", "llama-3.1", "mistral",
    "starcoder2", "nemotron", "nemotron-llama-3.1", "qwen2", "qwen2-window", "qwen3", "mixtral", "qwen2-moe",
    "qwen3-moe", "gemma2", "gemma3", "bloom", "bert", "bert-without-pairs", "bert-without-heads", "megatron-bert",
    "roberta", "t5", "t5-1.1",
]  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
def test_round_trip(name: str, tmp_path: Path) -> None:
    """Outputs within 1e-4 of the largest, files equal to the bit."""
    from tests.interop import references

    model = references.reference(name)
    source = references.saved(model, tmp_path / "source")
    import_model(source, tmp_path / "run", draw_heads=name == "bert-without-heads")
    assert_same_outputs(model, imported_model(tmp_path / "run"))

    export_model(tmp_path / "run", tmp_path / "out")
    for file in ("config.json", "model.safetensors"):
        assert (tmp_path / "out" / file).read_bytes() == (source / file).read_bytes(), file
    again, info = type(model).from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    for key, value in again.state_dict().items():
        assert value.equal(model.state_dict()[key]), key
