"""Experts of Megatron-LM are imported from all containers and shards in which it keeps them."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megajax.convert import main
from megajax.inference.trained import load_model
from megajax.models.parameters import named_leaves
from tests.interop import megatron_reference as reference
from tests.interop.test_megatron_arguments import MIXTURE, save

pytestmark = pytest.mark.needs("torch")

Shards = Callable[[str, list[np.ndarray]], dict[str, np.ndarray]]
"""(prefix, fc1 or fc2 of the experts of a rank) -> what the rank holds."""


def one_by_one(prefix: str, experts: list[np.ndarray]) -> dict[str, np.ndarray]:
    """SequentialMLP."""
    layer, name = prefix.rsplit(".", 1)
    return {f"{layer}.local_experts.{i}.{name}.weight": x for i, x in enumerate(experts)}


def grouped(prefix: str, experts: list[np.ndarray]) -> dict[str, np.ndarray]:
    """GroupedMLP: one matrix that lies in memory as [E, in, out]."""
    layer, name = prefix.rsplit(".", 1)
    together = np.stack([x.T for x in experts])
    shape = (experts[0].shape[1], -1) if name == "linear_fc1" else (-1, experts[0].shape[0])
    return {f"{layer}.weight{name[-1]}": together.reshape(shape)}


def cut(name: str, x: np.ndarray, rank: int) -> np.ndarray:
    """What one of two tensor ranks holds."""
    if "fc1.weight" in name:  # gate and up
        return np.concatenate([np.split(half, 2)[rank] for half in np.split(x, 2)])
    if "fc2.weight" in name or "proj.weight" in name:
        return np.split(x, 2, axis=1)[rank]
    return np.split(x, 2)[rank] if "qkv.weight" in name or "embeddings" in name or "output_layer" in name else x


def save_ranks(folder: Path, tensors: reference.Tensors, container: Shards) -> None:
    """Two tensor ranks x two expert ranks, no pipeline."""
    import torch

    sizes = {"tensor_model_parallel_size": 2, "expert_model_parallel_size": 2, "pipeline_model_parallel_size": 1}
    for tensor, expert in np.ndindex(2, 2):
        mine = {name: cut(name, x, tensor) for name, x in tensors.items() if ".experts." not in name}
        for layer, kind in np.ndindex(2, 2):
            prefix = f"decoder.layers.{layer}.mlp.experts.linear_fc{kind + 1}"
            names = [f"{prefix}.weight{i}" for i in (2 * expert, 2 * expert + 1)]
            mine |= container(prefix, [cut(name, tensors[name], tensor) for name in names])
        rank = folder / "iter_0000001" / f"mp_rank_{tensor:02d}_{expert:03d}"
        rank.mkdir(parents=True)
        model = {name: torch.tensor(x) for name, x in mine.items()}
        contents = {"args": Namespace(**MIXTURE | sizes), "checkpoint_version": 3.0, "model": model}
        torch.save(contents, rank / "model_optim_rng.pt")
    (folder / "latest_checkpointed_iteration.txt").write_text("1")


def save_distributed(folder: Path, tensors: reference.Tensors, *, stacked: bool) -> None:
    """All layers and experts in one tensor, or each of them apart."""
    import torch.distributed.checkpoint

    stored = {}
    for name, x in tensors.items():
        layer, experts, rest = name.partition(".mlp.experts.")
        if experts:
            kind, number = rest.split(".weight")
            stored[f"{layer}.mlp.experts.experts.{number}.{kind}.weight"] = x
        else:
            stored[name] = x
    if stacked:
        apart, stored = stored, {name: x for name, x in stored.items() if "layers" not in name}
        for name in (name for name in apart if "layers.0." in name):
            layers = [apart[name.replace("layers.0.", f"layers.{i}.")] for i in (0, 1)]
            stored.setdefault(name.replace("layers.0.", "layers."), np.stack(layers))
        for kind in ("linear_fc1", "linear_fc2"):
            experts = [stored.pop(f"decoder.layers.mlp.experts.experts.{e}.{kind}.weight") for e in range(4)]
            stored[f"decoder.layers.mlp.experts.experts.{kind}.weight"] = np.stack(experts, axis=1)
    folder.mkdir()
    weights = {name: torch.tensor(x) for name, x in stored.items()}
    torch.distributed.checkpoint.save(weights, checkpoint_id=folder, no_dist=True)
    torch.save({"args": Namespace(**MIXTURE)}, folder / "common.pt")


def weights(source: Path, run: Path) -> dict[str, Any]:
    """Our parameters of a checkpoint."""
    assert main(["import", str(source), "--out", str(run), "tokenizer.vocab_size=31"]) == 0
    return {name: np.asarray(leaf[...]) for name, leaf in named_leaves(load_model(run).model)}


@pytest.mark.filterwarnings("ignore::UserWarning:torch", "ignore::FutureWarning:torch")
def test_containers_and_shards_of_experts(tmp_path: Path) -> None:
    """Equal to the bit to one rank of TEGroupedMLP, whose logits are compared elsewhere."""
    tensors = reference.random_tensors(MIXTURE)
    wanted = weights(save(tmp_path / "one", MIXTURE, tensors), tmp_path / "run-one")
    save_ranks(tmp_path / "sequential", tensors, one_by_one)
    save_ranks(tmp_path / "grouped", tensors, grouped)
    save_distributed(tmp_path / "stacked", tensors, stacked=True)
    save_distributed(tmp_path / "apart", tensors, stacked=False)
    for source in ("sequential", "grouped", "stacked", "apart"):
        found = weights(tmp_path / source, tmp_path / f"run-{source}")
        assert found.keys() == wanted.keys()
        for name in wanted:
            np.testing.assert_array_equal(found[name], wanted[name], err_msg=f"{source} {name}")


def test_experts_cut_unlike_the_rest_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = save(tmp_path / "megatron", MIXTURE | {"expert_tensor_parallel_size": 2}, {})
    assert main(["import", str(source), "--out", str(tmp_path / "run")]) == 2
    assert "experts are cut over 2 ranks, the rest over 1" in capsys.readouterr().err
