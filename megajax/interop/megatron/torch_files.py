"""Reading of PyTorch's files without running code that they name; objects of unknown classes become empty."""

from __future__ import annotations

from argparse import Namespace
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from megajax.config.base import InputError


class Shell:
    """Stand in for an object of a class that is not loaded."""

    def __new__(cls, *_: Any, **__: Any) -> Shell:
        """Accept whatever the object was made of, and keep nothing."""
        return super().__new__(cls)

    def __setstate__(self, state: Any) -> None:
        pass


def torch() -> ModuleType:
    """Import PyTorch.

    Raises:
        InputError: PyTorch is not installed.
    """
    try:
        import_module("torch.distributed.checkpoint")
        return import_module("torch")
    except ImportError:
        raise InputError("reading checkpoints of Megatron-LM needs PyTorch: pip install torch") from None


def load(path: Path) -> Any:
    """Load the content of a file, with its tensors left on disk until they are asked for.

    Raises:
        InputError: the file is damaged, or not PyTorch's.
    """
    serialization = torch().serialization
    try:
        unknown = serialization.get_unsafe_globals_in_checkpoint(path)
        known = {"argparse.Namespace": Namespace}
        with serialization.safe_globals([(known.get(name, Shell), name) for name in unknown]):
            return torch().load(path, map_location="cpu", mmap=True, weights_only=True)
    except Exception as error:  # a damaged pickle may raise anything
        problem = " ".join(str(error).split())[:200]
        raise InputError(f"{path} cannot be read as a file of PyTorch ({problem})") from None


def numbers(tensor: Any) -> np.ndarray:
    """Return a tensor as an fp32 array."""
    return tensor.detach().to(torch().float32).numpy()


def read_row(reader: Any, key: str, about: Any, row: int) -> np.ndarray:
    """Read one row of a tensor in PyTorch's distributed format as fp32, without pieces that do not overlap it.

    Args:
        reader: reader of the checkpoint.
        key: name of the tensor.
        about: metadata of the tensor, as the checkpoint holds it.
        row: index of the row along the first dimension.
    """
    dcp, planners = torch().distributed.checkpoint, import_module("torch.distributed.checkpoint.default_planner")
    sizes = (1, *about.size[1:])
    chunk = dcp.metadata.ChunkStorageMetadata(
        offsets=torch().Size((row, *[0] * (len(sizes) - 1))), sizes=torch().Size(sizes)
    )
    into = torch().empty(sizes, dtype=about.properties.dtype)

    class Row(planners.DefaultLoadPlanner):  # type: ignore[name-defined]
        """Plan to read the part of the tensor that lies in `chunk` into `into`."""

        def create_local_plan(self) -> Any:
            """List the pieces of the files that overlap with the row."""
            items = import_module("torch.distributed.checkpoint.planner_helpers").create_read_items_for_chunk_list
            return dcp.planner.LoadPlan(items(key, about, [chunk]))

        def lookup_tensor(self, index: Any) -> Any:
            """Return the only tensor there is."""
            return into

    dcp.load({key: into}, storage_reader=reader, planner=Row(), no_dist=True)
    return numbers(into[0])
