"""Reading a config.json: what it says is taken, what it leaves out is what transformers takes it for, and what has no
counterpart here is refused by name.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from typing import Any, NamedTuple, TypeVar

from megajax.config.base import InputError
from megajax.config.model import Activation, ModelConfig

T = TypeVar("T")

ACTIVATIONS: dict[str, Activation] = {
    "gelu": "gelu_exact",
    "gelu_new": "gelu",
    "gelu_pytorch_tanh": "gelu",
    "gelu_fast": "gelu",
    "relu": "relu",
    "relu2": "squared_relu",
}
"""Their names of non-linearities -> ours."""


def activation_name(model: ModelConfig) -> str:
    """Their name of a model's non-linearity; "" if they have none."""
    return next((theirs for theirs, ours in ACTIVATIONS.items() if ours == model.activation), "")


class Nullable(NamedTuple):
    """A key that may be null, which is another thing than leaving it out where it has a default."""

    kind: type
    """What it is where it is not null."""
    default: Any = None


Defaults = Mapping[str, Any]
"""Every key that is read -> the value that it has in transformers where a file leaves it out."""
KINDS = {
    int: "a whole number of 32 bits",
    float: "a number",
    bool: "true or false",
    str: "a word",
    list: "a list",
    dict: "an object",
}


class Settings:
    """The values of one config.json, and the names of the tensors beside it."""

    def __init__(
        self,
        values: Mapping[str, Any],
        defaults: Defaults,
        aliases: Mapping[str, str] | None = None,
        tensors: Collection[str] = (),
        within: str = "",
    ) -> None:
        """Take the values as they are; each is checked when it is asked for.

        Args:
            values: the file.
            defaults: the keys that are asked for, and their defaults.
            aliases: other names of such keys.
            tensors: names of the tensors, which say which of the optional parts of a model there are.
            within: what keys begin with in messages.

        Raises:
            InputError: a key and its alias are there with different values.
        """
        self.values = dict(values)
        for alias, key in (aliases or {}).items():
            if alias in values and self.values.setdefault(key, values[alias]) != values[alias]:
                one, other = _short(values[key]), _short(values[alias])
                raise InputError(
                    f"config.json: {key} is {one} and {alias}, which means the same, {other}: leave one out"
                )
        self._defaults, self._tensors, self._within = defaults, tensors, within

    def get(self, key: str) -> Any:
        """A value, or its default where it is missing; None where it is null and may be.

        Raises:
            InputError: it is null and may not be, or something else than a value of its kind.
        """
        default = self._defaults[key]
        kind, default = default if isinstance(default, Nullable) else (type(default), default)
        value = self.values.get(key, default)
        if value is None and isinstance(self._defaults[key], Nullable):
            return None
        if not _is(value, kind):
            raise InputError(f"config.json: {self._within}{key} is {_short(value)}, not {KINDS[kind]}: correct it")
        return value

    def __getitem__(self, key: str) -> Any:
        """The same of a key that something else needs: it is never None.

        Raises:
            InputError: it is.
        """
        value = self.get(key)
        if value is None:
            raise InputError(f"config.json lacks {self._within}{key}: complete it")
        return value

    def only(self, key: str, *known: Any) -> None:
        """Refuse every other value of a key, its default included.

        Raises:
            InputError: it is another one.
        """
        if self.get(key) not in known:
            self.refuse(key, " or ".join(map(str, known)))

    def choose(self, key: str, known: Mapping[str, T]) -> T:
        """What stands for the value of a key.

        Raises:
            InputError: nothing does.
        """
        if self[key] not in known:
            self.refuse(key, ", ".join(known))
        return known[self[key]]

    def refuse(self, key: str, known: str) -> None:
        """Raise the InputError that there is no counterpart of a key's value."""
        raise InputError(
            f"config.json: {self._within}{key} is {_short(self.get(key))}, which megajax lacks: it has {known}"
        )

    def has(self, tensor: str) -> bool:
        """Whether a tensor of this name is there, behind whatever prefix."""
        return any(name == tensor or name.endswith(f".{tensor}") for name in self._tensors)


def _is(value: Any, kind: type) -> bool:
    if kind is float:
        return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    if kind is int:
        return isinstance(value, int) and not isinstance(value, bool) and abs(value) < 2**31
    return isinstance(value, kind)


def _short(value: Any) -> str:
    text = "null" if value is None else repr(value) if isinstance(value, str) else str(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
