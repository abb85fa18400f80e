"""Reading a config.json: what it says is taken, and what has no counterpart here is refused by name."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, TypeVar

from megajax.config.base import ConfigError
from megajax.config.model import Activation, ModelConfig

T = TypeVar("T")

ACTIVATIONS: dict[str, Activation] = {
    "gelu": "gelu_exact",
    "gelu_new": "gelu",
    "gelu_pytorch_tanh": "gelu",
    "gelu_fast": "gelu",
    "relu": "relu",
}
"""Their names of non-linearities -> ours."""


def activation_name(model: ModelConfig) -> str:
    """Their name of a model's non-linearity; "" if they have none."""
    return next((theirs for theirs, ours in ACTIVATIONS.items() if ours == model.activation), "")


class Settings:
    """The values of one config.json, and the names of the tensors beside it."""

    def __init__(self, values: Mapping[str, Any], tensors: Collection[str] = ()) -> None:
        """`tensors` says which of the optional parts of a model there are."""
        self.values = values
        self._tensors = tensors

    def __getitem__(self, key: str) -> Any:
        if self.values.get(key) is None:
            raise ConfigError(f"config.json lacks {key}: complete it")
        return self.values[key]

    def get(self, key: str, default: Any = None) -> Any:
        """A value, or the default where it is missing or null."""
        value = self.values.get(key)
        return default if value is None else value

    def only(self, key: str, *known: Any) -> None:
        """Refuse every other value of a key; it may be missing.

        Raises:
            ConfigError: it is another one.
        """
        if key in self.values and self.values[key] not in known:
            self.refuse(key, " or ".join(map(str, known)))

    def choose(self, key: str, known: Mapping[str, T]) -> T:
        """What stands for the value of a key.

        Raises:
            ConfigError: nothing does.
        """
        if self[key] not in known:
            self.refuse(key, ", ".join(known))
        return known[self[key]]

    def refuse(self, key: str, known: str) -> None:
        """Raise the ConfigError that there is no counterpart of a key's value."""
        raise ConfigError(f"config.json: {key} is {self.values[key]}, which megajax lacks: it has {known}")

    def has(self, tensor: str) -> bool:
        """Whether a tensor of this name is there, behind whatever prefix."""
        return any(name == tensor or name.endswith(f".{tensor}") for name in self._tensors)
