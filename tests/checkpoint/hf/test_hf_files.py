"""safetensors files, read tensor by tensor and written piece by piece."""

from __future__ import annotations

import json
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import save_file

from megajax.checkpoint.hf.source import Tensor, open_source
from megajax.checkpoint.hf.target import Target, in_shards
from megajax.config import ConfigError
from tests.checkpoint.hf.made import made


def test_files_are_those_that_the_library_writes(tmp_path: Path) -> None:
    """Byte for byte, mixed dtypes and signs of other alphabets included, whatever the order of writing."""
    rng = np.random.default_rng(0)
    values = {
        "b": rng.standard_normal((3, 5), np.float32),
        "wörter": rng.standard_normal((4,), np.float32).astype(jnp.bfloat16),
        "a": rng.standard_normal((2, 1), np.float32).astype(np.float16),
        "a.b": rng.standard_normal((1,), np.float32),
    }
    names = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}
    tensors = {
        name: Tensor(names[str(value.dtype)], value.shape, "model.safetensors") for name, value in values.items()
    }
    target = Target(tmp_path, tensors, {})
    for name, value in values.items():
        target.put(name, value.astype(np.float32))
    save_file(values, tmp_path / "expected", {"format": "pt"})
    assert (tmp_path / "model.safetensors").read_bytes() == (tmp_path / "expected").read_bytes()
    assert [path.name for path in tmp_path.iterdir() if "index" in path.name] == []


def test_shards() -> None:
    """Tensors of 8, 8, 40 and 4 bytes in files of at most 16; the third alone."""
    shapes = {"a": (2,), "b": (2,), "c": (10,), "d": (1,)}
    files = in_shards({name: Tensor("F32", shape, "") for name, shape in shapes.items()}, limit=16)
    assert files == {
        "a": "model-00001-of-00003.safetensors",
        "b": "model-00001-of-00003.safetensors",
        "c": "model-00002-of-00003.safetensors",
        "d": "model-00003-of-00003.safetensors",
    }


def test_an_index_goes_with_several_files(tmp_path: Path) -> None:
    tensors = {name: Tensor("BF16", (3,), f"model-0000{i}-of-00002.safetensors") for i, name in enumerate("ab", 1)}
    Target(tmp_path, tensors, {})
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert index["metadata"] == {"total_parameters": 6, "total_size": 12}
    assert index["weight_map"] == {name: tensor.file for name, tensor in tensors.items()}
    made_config = tmp_path / "config.json"
    made_config.write_text("{}")
    with open_source(tmp_path) as source:
        assert source.tensors == tensors


def test_what_is_missing_or_damaged_is_said(tmp_path: Path) -> None:
    source = made(tmp_path / "model")
    file = source / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-4])
    with pytest.raises(ConfigError, match=r"model.safetensors is damaged .*: download it again"), open_source(source):
        pass
    file.unlink()
    with pytest.raises(ConfigError, match=r"holds no model\.safetensors"), open_source(source):
        pass
    (source / "model.safetensors.index.json").write_text('{"weight_map": {"a": "one.safetensors"}}')
    with pytest.raises(ConfigError, match=r"one.safetensors: no such file"), open_source(source):
        pass
    (source / "config.json").unlink()
    with pytest.raises(ConfigError, match="give the directory of a Hugging Face model"), open_source(source):
        pass
