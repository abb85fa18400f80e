"""Language in which a family of Hugging Face's models is described: rows that read both ways.

A row ties keys of config.json to fields of our `ModelConfig`. It says which value transformers takes for a key that is
missing, how the key is read and how it is written; so a family is one list of rows, in the order in which they are
read, and not a reader beside a writer. Most rows tie one key to one field:

    field("n_embd", "hidden_size", 768)                        a number or word that both sides share
    choice("hidden_act", "activation", "gelu", ACTIVATIONS)    a word that has another name here
    only("is_decoder", False)                                  a key of which one value has a counterpart here
    always(norm="rmsnorm")                                     fields that no key says
    told("is_encoder_decoder", lambda model: True)             a key that is written and never read

Where several keys mean something together, a `Row` is made of two functions. A value that cannot be read is refused by
the name of its key.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from dataclasses import field as attribute
from typing import Any, NamedTuple, TypeVar

from pydantic import ValidationError

from megajax.config.base import InputError
from megajax.config.model import Activation, ModelConfig
from megajax.interop.patterns import Table
from megajax.models.families import model_class

T = TypeVar("T")

ACTIVATIONS: dict[str, Activation] = {
    "gelu": "gelu_exact",
    "gelu_new": "gelu",
    "gelu_pytorch_tanh": "gelu",
    "gelu_fast": "gelu",
    "relu": "relu",
    "relu2": "squared_relu",
}
"""Hugging Face's names of non-linearities -> ours."""
WORKED_OUT = {
    "num_kv_heads": "kv_heads",
    "head_dim": "head_size",
    "ffn_hidden_size": "ffn_size",
    "expert_ffn_size": "expert_size",
    "qkv_bias": "has_qkv_bias",
}
"""Fields that may be unset -> the property of `ModelConfig` that gives their value after the default."""


class Nullable(NamedTuple):
    """Default of a key that may be null, which is another thing than leaving it out."""

    kind: type
    """Type of the value where it is not null."""
    default: Any = None


Defaults = Mapping[str, Any]
"""Keys of config.json -> the value that transformers takes where a file leaves the key out."""
KINDS = {
    int: "a whole number of 32 bits",
    float: "a number",
    bool: "true or false",
    str: "a word",
    list: "a list",
    dict: "an object",
}


class Settings:
    """Give the values of one config.json, each checked when it is asked for, and the names of the tensors beside it."""

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
            values: content of the file.
            defaults: the keys that may be asked for, and their defaults.
            aliases: other names of such keys.
            tensors: names of the tensors, which say which optional parts the model has.
            within: prefix of the keys in messages.

        Raises:
            InputError: a key and its alias are there with different values.
        """
        self.values = dict(values)
        for alias, key in (aliases or {}).items():
            if alias in values:
                value, other = self.values.setdefault(key, values[alias]), values[alias]
                if value is not other and value != other:
                    raise InputError(
                        f"config.json: {key} is {_short(value)} and {alias}, which means the same, {_short(other)}: "
                        "leave one out"
                    )
        self._defaults, self._tensors, self._within = defaults, tensors, within

    def get(self, key: str) -> Any:
        """Return the value of a key, its default where it is missing, and None where it is null and may be.

        Raises:
            InputError: the value is null and may not be, or is of another type.
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
        """Return the value of a key that something else needs, which is never None.

        Raises:
            InputError: the value is null or missing.
        """
        value = self.get(key)
        if value is None:
            raise InputError(f"config.json lacks {self._within}{key}: complete it")
        return value

    def only(self, key: str, *known: Any) -> None:
        """Refuse a key unless its value, or the default that stands for it, is one of those known.

        Raises:
            InputError: the value is none of these.
        """
        if self.get(key) not in known:
            self.refuse(key, " or ".join(map(str, known)))

    def choose(self, key: str, known: Mapping[str, T]) -> T:
        """Translate the value of a key.

        Raises:
            InputError: the value is not among those known.
        """
        if self[key] not in known:
            self.refuse(key, ", ".join(known))
        return known[self[key]]

    def refuse(self, key: str, known: str) -> None:
        """Raise the InputError that the value of a key has no counterpart here; `known` lists those that have."""
        raise InputError(
            f"config.json: {self._within}{key} is {_short(self.get(key))}, which megajax lacks: it has {known}"
        )

    def has(self, tensor: str) -> bool:
        """Tell whether there is a tensor of this name, behind whatever prefix."""
        return any(name == tensor or name.endswith(f".{tensor}") for name in self._tensors)


class Row(NamedTuple):
    """Tie some keys of config.json to the fields of ours that they describe."""

    defaults: Defaults
    """Keys that `read` asks for, and their defaults."""
    read: Callable[[Settings], Mapping[str, Any]]
    """Function that returns fields of `ModelConfig`; where two rows give the same field, the later one counts."""
    write: Callable[[ModelConfig], Mapping[str, Any]]
    """Function that returns keys of config.json; where two rows give the same key, the later one counts."""
    aliases: Mapping[str, str] = {}
    """Other names of the keys, which transformers understands as well -> the names in `defaults`."""
    forms: Collection[str] = ()
    """Keys that say the same in another form, and are left out where the row is written anew."""


Rows = tuple[Row, ...]


def field(key: str, ours: str, default: Any, *aliases: str, written: str | None = None) -> Row:
    """Make the row of a key that has the value of one of our fields.

    Args:
        key: name in config.json.
        ours: name of the field of `ModelConfig`.
        default: value that transformers takes for a missing key.
        aliases: other names of the key.
        written: attribute of `ModelConfig` that is written; unset = the field's value after the default.
    """
    source = written or WORKED_OUT.get(ours, ours)
    return Row(
        {key: default},
        lambda settings: {ours: settings.get(key)},
        lambda model: {key: getattr(model, source)},
        dict.fromkeys(aliases, key),
    )


def choice(key: str, ours: str, default: str, names: Mapping[str, Any]) -> Row:
    """Make the row of a key whose words have other names here; what they have no word for is written as ""."""
    return Row(
        {key: default},
        lambda settings: {ours: settings.choose(key, names)},
        lambda model: {key: next((name for name, value in names.items() if value == getattr(model, ours)), "")},
    )


def only(key: str, *known: Any, default: Any = None, written: bool = False) -> Row:
    """Make the row of a key that describes nothing here and may have these values alone.

    Args:
        key: name in config.json.
        known: values of the key, the first of which is written, if one is.
        default: value of a missing key, if it is not the first one known.
        written: whether the key is written as well.
    """

    def read(settings: Settings) -> Mapping[str, Any]:
        settings.only(key, *known)
        return {}

    return Row({key: known[0] if default is None else default}, read, lambda _: {key: known[0]} if written else {})


def always(**fields: Any) -> Row:
    """Make the row of fields that every model of a family has, and that no key says."""
    return Row({}, lambda _: fields, lambda _: {})


def told(key: str, value: Callable[[ModelConfig], Any]) -> Row:
    """Make the row of a key that is written for others and never read."""
    return Row({}, lambda _: {}, lambda model: {key: value(model)})


def with_defaults(rows: Rows, **defaults: Any) -> Rows:
    """Give rows that a family shares with a relative the defaults of its own."""
    unknown = defaults.keys() - {key for row in rows for key in row.defaults}
    assert not unknown, unknown
    return tuple(
        row._replace(defaults={key: defaults.get(key, value) for key, value in row.defaults.items()}) for row in rows
    )


@dataclass(frozen=True)
class Family:
    """The models of one `model_type` of config.json."""

    model_type: str
    architecture: Callable[[ModelConfig], str]
    """Name of the class that loads a model with all parts that ours has."""
    rows: Rows
    table: Callable[[ModelConfig], Table]
    """Function that returns where the tensors of a model go; the names have the prefix."""
    prefix: str
    """Beginning of tensor names, which is missing if they were saved without the head."""
    heads: frozenset[str] = frozenset({"head"})
    """Parameters that a file may lack."""
    twins: Mapping[str, str] = attribute(default_factory=dict)
    """Tensors that some files hold a second time -> the names under which they are read."""

    @property
    def defaults(self) -> Defaults:
        """Return every key that is read, and its default."""
        return {key: value for row in self.rows for key, value in row.defaults.items()}

    @property
    def aliases(self) -> Mapping[str, str]:
        """Return other names of keys -> the names in `defaults`."""
        return {alias: key for row in self.rows for alias, key in row.aliases.items()}

    def described(self, values: Mapping[str, Any], tensors: Collection[str] = ()) -> ModelConfig:
        """Return the model that is described by a config.json, which lies beside tensors of these names.

        Raises:
            InputError: the values describe no model, or one that has no counterpart here.
        """
        for key in ("quantization_config", "per_layer_config"):
            if values.get(key):
                raise InputError(f"config.json: there is a {key}, which megajax lacks: save the model without it")
        settings = Settings(values, self.defaults, self.aliases, tensors)
        read = [(row.defaults, row.read(settings)) for row in self.rows]
        try:
            model = ModelConfig(**_merged(fields for _, fields in read))
        except InputError as error:  # speaks of our fields
            theirs = {f"model.{ours}": key for keys, fields in read for key, ours in _only_pair(keys, fields)}
            text = re.sub(r"model\.\w+", lambda name: theirs.get(name[0], name[0]), str(error))
            raise InputError(f"config.json: {text}") from None
        except ValidationError as error:
            problem = error.errors()[0]
            where = ".".join(map(str, problem["loc"]))
            raise InputError(f"config.json: {problem['input']!s:.60} for {where}: {problem['msg']}") from None
        if values.get("is_causal") not in (None, model_class(model).causal):
            raise InputError(f"config.json: is_causal is {values['is_causal']}, which no {self.model_type} is here")
        return model

    def write(self, model: ModelConfig) -> dict[str, Any]:
        """Return config.json of a model, without `architectures`, `model_type` and dtype."""
        return _merged(row.write(model) for row in self.rows)


def _only_pair(keys: Defaults, fields: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return the key and the field of a row that ties one to one, in a list that is empty for other rows."""
    return list(zip(keys, fields, strict=True)) if len(keys) == len(fields) == 1 else []


def _merged(parts: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    return {key: value for part in parts for key, value in part.items()}


def _is(value: Any, kind: type) -> bool:
    if kind is float:
        return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    if kind is int:
        return isinstance(value, int) and not isinstance(value, bool) and abs(value) < 2**31
    return isinstance(value, kind)


def _short(value: Any) -> str:
    text = "null" if value is None else repr(value) if isinstance(value, str) else str(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
