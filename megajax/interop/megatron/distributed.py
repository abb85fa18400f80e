"""Reading of checkpoints in PyTorch's distributed format (`--ckpt-format torch_dist`, the default), layer by layer.

iter_0000100/metadata.json, common.pt (args), .metadata, __*_*.distcp
"""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path
from typing import Any

import numpy as np

from megajax.config.base import InputError
from megajax.interop.megatron.names import ONE_EXPERT, canonical
from megajax.interop.megatron.torch_files import load, numbers, read_row, torch

STACK = "decoder.layers."


class DistributedFiles:
    """Read the weights of one iteration; layers are stacked in one tensor, or each has its own."""

    def __init__(self, directory: Path) -> None:
        """Read names, shapes and arguments.

        Raises:
            InputError: the files are damaged.
        """
        self._reader = torch().distributed.checkpoint.FileSystemReader(directory)
        common = load(directory / "common.pt")
        if not isinstance(common, dict) or not isinstance(common.get("args"), Namespace):
            raise InputError(f"{directory / 'common.pt'} lacks `args`: it is no checkpoint of Megatron-LM")
        self.args = common["args"]
        try:
            stored = self._reader.read_metadata().state_dict_metadata
        except Exception as error:  # a damaged pickle may raise anything
            raise InputError(f"{directory / '.metadata'} cannot be read ({error})") from None
        self._stored: dict[str, tuple[str, Any]] = {}
        for key, about in stored.items():
            if hasattr(about, "size") and not key.startswith(("optimizer.", "rng_state")) and (name := canonical(key)):
                self._stored[name] = key, about
        self.whole_names = {name for name in self._stored if not name.startswith(STACK)}
        rest = [name.removeprefix(STACK) for name in self._stored if name.startswith(STACK)]
        self._stacked = not any(name.split(".")[0].isdigit() for name in rest)
        names = set(rest) if self._stacked else {name.partition(".")[2] for name in rest}
        self.layer_names = {ONE_EXPERT.sub("", name) for name in names}
        self._read: tuple[str, np.ndarray] | None = None

    def whole(self, name: str) -> np.ndarray:
        """Read a tensor of the model as fp32."""
        key, about = self._stored[name]
        empty = torch().empty(about.size, dtype=about.properties.dtype)
        torch().distributed.checkpoint.load({key: empty}, storage_reader=self._reader, no_dist=True)
        return numbers(empty)

    def layer(self, number: int, name: str) -> np.ndarray:
        """Read a tensor of a layer as fp32; experts that lie apart become one tensor.

        Megatron-LM writes a stack of layers in pieces that hold one layer each, and then no more than that layer is
        read. A stack that was written whole is kept until another one is asked for.
        """
        place = STACK if self._stacked else f"{STACK}{number}."
        if place + name not in self._stored:
            before, experts, after = name.partition("mlp.experts.")
            apart = [f"{before}{experts}{i}.{after}" for i in range(self.args.num_experts)]
            return np.stack([self.layer(number, expert) for expert in apart])
        if not self._stacked:
            return self.whole(place + name)
        key, about = self._stored[STACK + name]
        if all(chunk.sizes[0] == 1 for chunk in about.chunks):
            return read_row(self._reader, key, about, number)
        if self._read is None or self._read[0] != name:
            self._read = name, self.whole(STACK + name)
        return self._read[1][number]
