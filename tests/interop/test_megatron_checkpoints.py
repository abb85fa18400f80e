"""Megatron-LM's checkpoints, in shards as its ranks write them, are imported bit by bit."""

from __future__ import annotations

import json
from argparse import Namespace
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megajax.config import ModelConfig
from megajax.convert import main
from megajax.inference.trained import load_model
from megajax.models.parameters import named_leaves
from tests.models.tiny import random_model

pytestmark = pytest.mark.needs("torch")

GPT = ModelConfig(num_layers=4, hidden_size=16, num_heads=4, max_positions=16, vocab_size=60, vocab_multiple=64)
LLAMA = replace(
    GPT, num_kv_heads=2, positions="rope", norm="rmsnorm", activation="swiglu", bias=False, tied_head=False,
    ffn_hidden_size=24,
)  # fmt: skip
MODELS = {"gpt": GPT, "llama": LLAMA}
ROWS, COLUMNS = ("qkv", "word_embeddings", "output_layer", "fc1"), ("proj.weight", "fc2.weight")
Tensors = dict[str, np.ndarray]


def arguments(c: ModelConfig) -> Namespace:
    """As Megatron-LM saves them."""
    return Namespace(
        num_layers=c.num_layers,
        hidden_size=c.hidden_size,
        num_attention_heads=c.num_heads,
        group_query_attention=c.num_kv_heads is not None,
        num_query_groups=c.num_kv_heads or 1,
        kv_channels=c.head_size,
        ffn_hidden_size=c.ffn_size,
        max_position_embeddings=c.max_positions,
        seq_length=8,
        padded_vocab_size=c.padded_vocab_size,
        swiglu=c.gated,
        add_bias_linear=c.bias,
        normalization="LayerNorm" if c.norm == "layernorm" else "RMSNorm",
        norm_epsilon=c.norm_eps,
        position_embedding_type="rope" if c.positions == "rope" else "learned_absolute",
        untie_embeddings_and_output_weights=not c.tied_head,
        attention_dropout=0.0,
        hidden_dropout=0.0,
    )


def whole_tensors(c: ModelConfig) -> tuple[Tensors, list[Tensors], Tensors]:
    """Weights of the model and of each layer under Megatron core's names, and ours."""
    ours = {name: np.asarray(leaf[...]) for name, leaf in named_leaves(random_model(c))}
    whole = {"embedding.word_embeddings.weight": ours["word_embedding"]}
    if c.positions == "learned":
        whole["embedding.position_embeddings.weight"] = ours["position_embedding"]
    if not c.tied_head:
        whole["output_layer.weight"] = ours["head"]
    layers: list[Tensors] = [{} for _ in range(c.num_layers)]
    for theirs, name in (("weight", "scale"), ("bias", "bias")):
        if f"final_norm.{name}" not in ours:
            continue
        whole[f"decoder.final_layernorm.{theirs}"] = ours[f"final_norm.{name}"]
        for i, layer in enumerate(layers):
            layer[f"self_attention.linear_qkv.layer_norm_{theirs}"] = ours[f"blocks.attention_norm.{name}"][i]
            layer[f"mlp.linear_fc1.layer_norm_{theirs}"] = ours[f"blocks.mlp_norm.{name}"][i]
    for i, layer in enumerate(layers):
        qkv, out = ours["blocks.attention.qkv"][i], ours["blocks.attention.out"][i]
        layer["self_attention.linear_qkv.weight"] = qkv.transpose(1, 2, 3, 0).reshape(-1, c.hidden_size)
        layer["self_attention.linear_proj.weight"] = out.reshape(-1, c.hidden_size).T
        layer["mlp.linear_fc1.weight"] = ours["blocks.mlp.fc1"][i].transpose(1, 2, 0).reshape(-1, c.hidden_size)
        layer["mlp.linear_fc2.weight"] = ours["blocks.mlp.fc2"][i].T
        if c.bias:
            layer["self_attention.linear_qkv.bias"] = ours["blocks.attention.qkv_bias"][i].reshape(-1)
            layer["self_attention.linear_proj.bias"] = ours["blocks.attention.out_bias"][i]
            layer["mlp.linear_fc1.bias"] = ours["blocks.mlp.fc1_bias"][i].reshape(-1)
            layer["mlp.linear_fc2.bias"] = ours["blocks.mlp.fc2_bias"][i]
    return whole, layers, ours


def shard(name: str, x: np.ndarray, rank: int, ranks: int, c: ModelConfig) -> np.ndarray:
    """What one tensor rank holds; of a gated fc1, its part of the gate and its part of what goes up."""
    if "layer_norm" in name:
        return x
    if "fc1" in name and c.gated:
        return np.concatenate([np.split(half, ranks)[rank] for half in np.split(x, 2)])
    if any(part in name for part in ROWS):
        return np.split(x, ranks)[rank]
    return np.split(x, ranks, axis=1)[rank] if name.endswith(COLUMNS) else x


def save_ranks(folder: Path, c: ModelConfig, tensor: int, pipe: int, chunks: int) -> Tensors:
    """One file a rank; virtual stages go round the stages, layers count from 0 in each. Returns our weights."""
    import torch

    whole, layers, ours = whole_tensors(c)
    count = c.num_layers // (pipe * chunks)
    for t, p in np.ndindex(tensor, pipe):
        contents: dict[str, Any] = {"args": arguments(c), "checkpoint_version": 3.0, "iteration": 7}
        for chunk in range(chunks):
            mine = layers[(chunk * pipe + p) * count :][:count]
            state = {f"decoder.layers.{i}.{name}": x for i, layer in enumerate(mine) for name, x in layer.items()}
            if (chunk, p) == (0, 0):
                state |= {name: x for name, x in whole.items() if name.startswith("embedding")}
            if (chunk, p) == (chunks - 1, pipe - 1):
                state |= {name: x for name, x in whole.items() if not name.startswith("embedding")}
            tensors = {name: torch.tensor(shard(name, x, t, tensor, c)) for name, x in state.items()}
            contents["model" if chunks == 1 else f"model{chunk}"] = tensors | {"decoder.layers.0._extra_state": None}
        rank = folder / "iter_0000007" / (f"mp_rank_{t:02d}_{p:03d}" if pipe > 1 else f"mp_rank_{t:02d}")
        rank.mkdir(parents=True)
        torch.save(contents, rank / "model_optim_rng.pt")
    (folder / "latest_checkpointed_iteration.txt").write_text("7")
    return ours


def layer_by_layer() -> Any:
    """A planner that writes every row of a tensor as a piece of its own, as Megatron-LM's sharded tensors are."""
    from torch import Size
    from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
    from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType

    class Planner(DefaultSavePlanner):
        def create_local_plan(self) -> SavePlan:
            items = []
            for name, tensor in self.state_dict.items():
                about = TensorProperties.create_from_tensor(tensor)
                for row in range(len(tensor)):
                    offsets, sizes = Size((row, *[0] * (tensor.ndim - 1))), Size((1, *tensor.shape[1:]))
                    data = TensorWriteData(ChunkStorageMetadata(offsets, sizes), about, tensor.shape)
                    items.append(WriteItem(MetadataIndex(name, offsets), WriteItemType.SHARD, tensor_data=data))
            self.plan = SavePlan(items, planner_data=self.mappings)
            return self.plan

        def lookup_object(self, index: MetadataIndex) -> Any:
            assert index.offset is not None
            return self.state_dict[index.fqn][index.offset[0] :][:1].clone()

    return Planner()


def save_distributed(folder: Path, c: ModelConfig, *, pieces: bool) -> Tensors:
    """The default layout: layers stacked, and some of the optimizer beside them. Returns our weights."""
    import torch.distributed.checkpoint

    whole, layers, ours = whole_tensors(c)
    stacks = {f"decoder.layers.{name}": np.stack([layer[name] for layer in layers]) for name in layers[0]}
    tensors = {name: torch.tensor(x) for name, x in {**whole, **stacks}.items()}
    tensors["optimizer.state.exp_avg.decoder.final_layernorm.weight"] = torch.zeros(16)
    iteration = folder / "iter_0000007"
    iteration.mkdir(parents=True)
    planner = layer_by_layer() if pieces else None
    torch.distributed.checkpoint.save(tensors, checkpoint_id=iteration, planner=planner, no_dist=True)
    torch.save({"args": arguments(c), "iteration": 7}, iteration / "common.pt")
    (iteration / "metadata.json").write_text(json.dumps({"sharded_backend": "torch_dist"}))
    (folder / "latest_checkpointed_iteration.txt").write_text("7")
    return ours


def assert_imported(source: Path, run: Path, ours: Tensors) -> None:
    """All weights to the bit, rows beyond the vocabulary of 60 left out."""
    assert main(["import", str(source), "--out", str(run), "model.vocab_size=60", "tokenizer.vocab_size=59"]) == 0
    for name, leaf in named_leaves(load_model(run).model):
        rows = 60 if name in ("word_embedding", "head") else None
        np.testing.assert_array_equal(np.asarray(leaf[...])[:rows], ours[name][:rows], err_msg=name)


@pytest.mark.parametrize("style", MODELS)
@pytest.mark.parametrize(("tensor", "pipe", "chunks"), [(1, 1, 1), (2, 2, 1), (2, 2, 2)])
def test_ranks_are_put_together(tmp_path: Path, style: str, tensor: int, pipe: int, chunks: int) -> None:
    ours = save_ranks(tmp_path / "megatron", MODELS[style], tensor, pipe, chunks)
    assert_imported(tmp_path / "megatron", tmp_path / "run", ours)


@pytest.mark.filterwarnings("ignore::UserWarning:torch", "ignore::FutureWarning:torch")
@pytest.mark.parametrize(("style", "pieces"), [("gpt", False), ("llama", False), ("llama", True)])
def test_distributed_checkpoints(tmp_path: Path, style: str, pieces: bool) -> None:
    ours = save_distributed(tmp_path / "megatron", MODELS[style], pieces=pieces)
    assert_imported(tmp_path / "megatron", tmp_path / "run", ours)


@pytest.mark.parametrize("version", [0, 1.0])
def test_rows_of_old_versions(tmp_path: Path, version: float) -> None:
    """Version 0 holds [3, heads, dim] on each rank, version 1 [heads, dim, 3]; names and nesting are old as well."""
    import torch

    ours = save_ranks(tmp_path / "megatron", GPT, tensor=2, pipe=1, chunks=1)
    for path in (tmp_path / "megatron").rglob("*.pt"):
        contents = torch.load(path, weights_only=False)
        encoder, embedding = {}, {}
        for name, tensor in contents["model"].items():
            x = tensor
            if name.endswith(("linear_qkv.weight", "linear_qkv.bias")):
                rows = x.reshape(2, 3, 4, -1)
                x = (rows.permute(1, 0, 2, 3) if version == 0 else rows.permute(0, 2, 1, 3)).reshape(x.shape)
            if name.startswith("embedding."):
                _, table, kind = name.split(".")
                embedding[table] = {kind: x}
            else:
                old = name.removeprefix("decoder.").replace("self_attention.linear_qkv.layer_norm_", "input_norm.")
                encoder[old.replace("self_attention.linear_qkv.", "attention.query_key_value.")] = x
        contents["model"] = {"language_model": {"embedding": embedding, "encoder": encoder}}
        torch.save(contents | {"checkpoint_version": version}, path)
    assert_imported(tmp_path / "megatron", tmp_path / "run", ours)


def test_what_cannot_come_in_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    import torch

    save_ranks(tmp_path / "megatron", GPT, tensor=2, pipe=1, chunks=1)
    one, two = sorted((tmp_path / "megatron").rglob("*.pt"))
    contents, run = torch.load(one, weights_only=False), tmp_path / "run"

    def refused() -> str:
        assert main(["import", str(tmp_path / "megatron"), "--out", str(run)]) == 2
        assert not run.exists()
        return capsys.readouterr().err

    for key, value in {"num_experts": 8, "quick_geglu": True, "position_embedding_type": "yarn"}.items():
        torch.save(contents | {"args": Namespace(**(vars(contents["args"]) | {key: value}))}, one)
        assert f"args.{key}" in refused()
    one.write_bytes(b"no file of PyTorch")
    assert "cannot be read as a file of PyTorch" in refused()
    two.unlink()
    torch.save(contents, one)
    assert "mp_rank_01 has no model_optim_rng.pt" in refused()
    (tmp_path / "megatron" / "latest_checkpointed_iteration.txt").write_text("seven")
    assert "latest_checkpointed_iteration.txt holds 'seven', not the number of an iteration" in refused()
