"""safetensors files are read tensor by tensor and written piece by piece."""

from __future__ import annotations

import json
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from megajax.config import InputError
from megajax.interop.hf.files import Target, Tensor, in_shards, open_source
from tests.interop.hf.made import made


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
    with pytest.raises(InputError, match=r"model.safetensors is damaged .*: download it again"), open_source(source):
        pass
    file.unlink()
    with pytest.raises(InputError, match=r"holds no model\.safetensors"), open_source(source):
        pass
    (source / "model.safetensors.index.json").write_text('{"weight_map": {"a": "one.safetensors"}}')
    with (
        pytest.raises(InputError, match=r"index.json names one.safetensors, and there is no such file"),
        open_source(source),
    ):
        pass
    (source / "config.json").unlink()
    with pytest.raises(InputError, match="give the directory of a Hugging Face model"), open_source(source):
        pass


def sharded(directory: Path) -> Path:
    """A model in two files, with their index."""
    source = made(directory)
    values = load_file(source / "model.safetensors")
    (source / "model.safetensors").unlink()
    names = sorted(values)
    halves = {"one.safetensors": names[::2], "two.safetensors": names[1::2]}
    for file, part in halves.items():
        save_file({name: values[name] for name in part}, source / file)
    weight_map = {name: file for file, part in halves.items() for name in part}
    (source / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return source


def refused(source: Path, said: str) -> None:
    """The model cannot be opened, and the line says this."""
    with pytest.raises(InputError, match=said) as caught, open_source(source):
        pass
    assert "\n" not in str(caught.value)


def test_a_model_that_is_there_twice_must_be_one(tmp_path: Path) -> None:
    """An index with its files beside a single file: the same numbers are one model, others are refused."""
    source = sharded(tmp_path / "model")
    made(tmp_path / "whole")
    single = source / "model.safetensors"
    single.write_bytes((tmp_path / "whole/model.safetensors").read_bytes())
    with open_source(source) as opened:
        assert {tensor.file for tensor in opened.tensors.values()} == {"one.safetensors", "two.safetensors"}
    values = load_file(single)
    values["transformer.ln_f.bias"][3] += 1
    save_file(values, single)
    refused(
        source, r"two models, model.safetensors and the files of .*index.json, which differ in transformer.ln_f.bias"
    )
    del values["transformer.ln_f.bias"]
    save_file(values, single)
    refused(source, r"differ in transformer.ln_f.bias")


def test_an_index_that_contradicts_its_files(tmp_path: Path) -> None:
    """Files that are missing, tensors elsewhere or twice, and what is no index."""
    source = sharded(tmp_path / "model")
    index = source / "model.safetensors.index.json"
    places = json.loads(index.read_text())["weight_map"]
    name = "transformer.ln_f.bias"
    other = {"one.safetensors": "two.safetensors", "two.safetensors": "one.safetensors"}[places[name]]
    index.write_text(json.dumps({"weight_map": places | {name: other}}))
    refused(source, f"index.json says that {other} holds {name}, which it does not")
    for wrong in ({}, {"weight_map": []}, {"weight_map": {}}):
        index.write_text(json.dumps(wrong))
        refused(source, "index.json has no weight_map")
    for file in ("../model/one.safetensors", 3, None):
        index.write_text(json.dumps({"weight_map": places | {name: file}}))
        refused(source, "is no name of a file for transformer.ln_f.bias")
    index.write_text(json.dumps({"weight_map": places}))
    save_file(load_file(source / other) | {name: np.zeros(16, np.float32)}, source / other)
    refused(source, f"one.safetensors and two.safetensors both hold {name}")
    (source / other).unlink()
    refused(source, f"index.json names {other}, and there is no such file")
