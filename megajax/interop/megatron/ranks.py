"""Reading of checkpoints with one file per rank (`--ckpt-format torch`), whose tensors are put together from shards.

iter_0000100/mp_rank_{tensor:02d}[_{pipe:03d}][_{expert:03d}]/model_optim_rng.pt
    model, or model0, model1, ... of virtual stages
"""

from __future__ import annotations

import re
from argparse import Namespace
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from megajax.config.base import InputError
from megajax.interop.megatron.names import ONE_EXPERT, canonical
from megajax.interop.megatron.torch_files import load, numbers

FOLDER = re.compile(r"mp_rank_(\d+)(?:_(\d+))?(?:_(\d+))?$")
ROWS = ("word_embeddings.weight", "output_layer.weight", "output_layer.bias", "linear_qkv.weight", "linear_qkv.bias")
"""Endings of the names of tensors that ranks cut along the first dimension."""
GATED = ("linear_fc1.weight", "linear_fc1.bias")
"""Endings of the names of tensors whose halves, gate and up, are each cut along the first dimension."""
COLUMNS = ("linear_proj.weight", "linear_fc2.weight")
"""Endings of the names of tensors that are cut along the second dimension."""

EXPERTS = "mlp.experts."

Chunk = dict[str, Any]
"""Tensors of one virtual stage on one rank, by name."""


class RankFiles:
    """Read the weights of one iteration."""

    def __init__(self, directory: Path) -> None:
        """Open all files.

        Raises:
            InputError: a file is missing, or the layers do not add up.
        """
        self.where = directory
        found = [(path, _contents(path)) for path in directory.iterdir() if FOLDER.search(path.name)]
        files = {_rank(path, contents["args"]): contents for path, contents in found}
        self.tensor, self.pipe, self.expert = (1 + max(rank[i] for rank in files) for i in range(3))
        for rank in np.ndindex(self.tensor, self.pipe, self.expert):
            if rank not in files:
                named = f"tensor rank {rank[0]}, pipeline rank {rank[1]}, expert rank {rank[2]}"
                raise InputError(f"{directory} has no file of {named}")
        first = files[0, 0, 0]
        self.args: Namespace = first["args"]
        self._experts = (getattr(self.args, "num_experts", None) or 0) // self.expert
        self._check_expert_shards()
        self._version = float(first.get("checkpoint_version", 0))
        self._chunks = {rank: [self._apart(chunk) for chunk in _chunks(contents)] for rank, contents in files.items()}
        self._places = dict(self._layers())
        if len(self._places) != self.args.num_layers:
            raise InputError(f"{directory} holds {len(self._places)} layers, its args say {self.args.num_layers}")
        stages = [self._chunks[0, pipe, 0] for pipe in range(self.pipe)]
        names = {ONE_EXPERT.sub("", name) for chunks in stages for chunk in chunks for name in chunk}
        self.whole_names = {name for name in names if not name.startswith("decoder.layers.")}
        self.layer_names = {name.split(".", 3)[3] for name in names - self.whole_names}

    def whole(self, name: str) -> np.ndarray:
        """Read a tensor of the model as fp32; a tied table, which two stages hold, is read from the first one."""
        for pipe in range(self.pipe):
            for number, chunk in enumerate(self._chunks[0, pipe, 0]):
                if name in chunk:
                    return self._joined(pipe, number, name)
        raise KeyError(name)

    def layer(self, number: int, name: str) -> np.ndarray:
        """Read a tensor of a layer as fp32; its experts become one tensor."""
        pipe, chunk, local = self._places[number]
        prefix = f"decoder.layers.{local}."
        if not name.startswith(EXPERTS):
            return self._joined(pipe, chunk, prefix + name)
        rest = name.removeprefix(EXPERTS)
        ranks = np.ndindex(self.expert, self._experts)
        return np.stack([self._joined(pipe, chunk, f"{prefix}{EXPERTS}{i}.{rest}", rank) for rank, i in ranks])

    def _check_expert_shards(self) -> None:
        shards = getattr(self.args, "expert_tensor_parallel_size", None) or self.tensor
        if self._experts and (shards != self.tensor or getattr(self.args, "moe_extended_tp", False)):
            raise InputError(
                f"{self.where}: experts are cut over {shards} ranks, the rest over {self.tensor}: files of such ranks "
                "cannot be put together, save as torch_dist"
            )

    def _apart(self, chunk: Chunk) -> Chunk:
        """Split the experts of the first grouped kernel: weight1 is [E, D, A F] in memory, weight2 [E, F, D]."""
        apart: Chunk = {}
        for name, value in chunk.items():
            layer, grouped, kind = name.partition(f"{EXPERTS}weight")
            if not grouped:
                apart[name] = value
                continue
            shape = (self._experts, self.args.hidden_size, -1) if kind == "1" else (self._experts, -1, value.shape[-1])
            for i, expert in enumerate(value.view(shape)):
                apart[f"{layer}{EXPERTS}{i}.linear_fc{kind}.weight"] = expert.T
        return apart

    def _layers(self) -> Iterator[tuple[int, tuple[int, int, int]]]:
        """Iterate over (layer, (stage, virtual stage, its number there)); virtual stages go round the stages."""
        first = 0
        for chunk in range(len(self._chunks[0, 0, 0])):
            for pipe in range(self.pipe):
                names = (name.split(".") for name in self._chunks[0, pipe, 0][chunk])
                local = sorted({int(parts[2]) for parts in names if parts[:2] == ["decoder", "layers"]})
                for offset, number in enumerate(local):
                    yield first + offset, (pipe, chunk, number)
                first += len(local)

    def _joined(self, pipe: int, chunk: int, name: str, expert: int = 0) -> np.ndarray:
        try:
            parts = [numbers(self._chunks[tensor, pipe, expert][chunk][name]) for tensor in range(self.tensor)]
        except KeyError:
            raise InputError(f"{self.where}: some tensor rank of stage {pipe} lacks {name}") from None
        if "linear_qkv" in name and self._version < 2:
            parts = [self._reordered(part) for part in parts]
        if name.endswith(GATED) and getattr(self.args, "swiglu", False):
            halves = [np.split(part, 2) for part in parts]
            return np.concatenate([half[i] for i in (0, 1) for half in halves])
        if name.endswith(ROWS + GATED):
            return np.concatenate(parts)
        return np.concatenate(parts, axis=1) if name.endswith(COLUMNS) else parts[0]

    def _reordered(self, rows: np.ndarray) -> np.ndarray:
        """Bring rows of linear_qkv of old versions, [3, heads, dim] (0) or [heads, dim, 3] (1), to [heads, 3, dim]."""
        heads = self.args.num_attention_heads // self.tensor
        dim, rest = len(rows) // (3 * heads), rows.shape[1:]
        if self._version >= 1:
            return np.moveaxis(rows.reshape(heads, dim, 3, *rest), 2, 1).reshape(rows.shape)
        return np.moveaxis(rows.reshape(3, heads, dim, *rest), 0, 1).reshape(rows.shape)


def _rank(path: Path, args: Namespace) -> tuple[int, int, int]:
    """Return the (tensor, pipeline, expert) rank; a second number alone is the pipeline's, if there is a pipeline."""
    found = FOLDER.search(path.name)
    assert found is not None
    tensor, second, third = (int(number or 0) for number in found.groups())
    if found[3] is None and getattr(args, "pipeline_model_parallel_size", 2) == 1:
        return tensor, 0, second
    return tensor, second, third


def _contents(folder: Path) -> dict[str, Any]:
    files = sorted(folder.glob("model*.pt"))
    if not files:
        raise InputError(f"{folder} has no model_optim_rng.pt")
    contents = load(files[0])
    is_ours = isinstance(contents, dict) and isinstance(contents.get("args"), Namespace)
    if not is_ours or not ("model" in contents or "model0" in contents):
        raise InputError(f"{files[0]} lacks `args` or `model`: it is no checkpoint of Megatron-LM")
    return contents


def _chunks(contents: Mapping[str, Any]) -> Iterator[Chunk]:
    if "model" in contents:
        yield dict(_flat(contents["model"]))
    number = 0
    while f"model{number}" in contents:
        yield dict(_flat(contents[f"model{number}"]))
        number += 1


def _flat(state: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Iterate over the tensors of nested dictionaries, as old versions have them, by canonical name."""
    for key, value in state.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{key}.")
        elif hasattr(value, "detach") and (name := canonical(f"{prefix}{key}")):
            yield name, value
