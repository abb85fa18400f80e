"""PyTorch's files without running anything that they name: what is no tensor or number becomes an empty shell."""

from __future__ import annotations

from argparse import Namespace
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from megajax.config.base import ConfigError


class Shell:
    """In the place of an object of a class that is not loaded."""

    def __new__(cls, *_: Any, **__: Any) -> Shell:
        """Take whatever the object was made of, and keep nothing."""
        return super().__new__(cls)

    def __setstate__(self, state: Any) -> None:
        pass


def torch() -> ModuleType:
    """PyTorch.

    Raises:
        ConfigError: it is not installed.
    """
    try:
        import_module("torch.distributed.checkpoint")
        return import_module("torch")
    except ImportError:
        raise ConfigError("reading checkpoints of Megatron-LM needs PyTorch: pip install torch") from None


def load(path: Path) -> Any:
    """What a file holds, its tensors left on disk until they are asked for.

    Raises:
        ConfigError: it is damaged, or no file of PyTorch.
    """
    serialization = torch().serialization
    try:
        unknown = serialization.get_unsafe_globals_in_checkpoint(path)
        known = {"argparse.Namespace": Namespace}
        with serialization.safe_globals([(known.get(name, Shell), name) for name in unknown]):
            return torch().load(path, map_location="cpu", mmap=True, weights_only=True)
    except Exception as error:  # a damaged pickle may raise anything
        problem = " ".join(str(error).split())[:200]
        raise ConfigError(f"{path} cannot be read as a file of PyTorch ({problem})") from None


def numbers(tensor: Any) -> np.ndarray:
    """A tensor as fp32."""
    return tensor.detach().to(torch().float32).numpy()
