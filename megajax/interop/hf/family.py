"""What there is to know of a family of Hugging Face's models: its settings, and where its tensors go."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from pydantic import ValidationError

from megajax.config.base import InputError
from megajax.config.model import ModelConfig
from megajax.interop.hf.settings import Defaults, Settings
from megajax.models.families import model_class

Table = Mapping[str, Mapping[str, str]]
"""Our parameter -> the tensors that it is made of and how each lies in it (see `patterns`), in the order in which they
lie side by side. Names have a {layer}, and an {expert}, where the parameter has one more dimension. It may have rows of
parameters that a model lacks."""


@dataclass(frozen=True)
class Family:
    """One `model_type` of config.json."""

    model_type: str
    architecture: Callable[[ModelConfig], str]
    """Name of the class that loads a model with all that ours has."""
    defaults: Defaults
    """The keys that `read` asks for, with the values that transformers takes for missing ones."""
    read: Callable[[Settings], ModelConfig]
    """The model that a config.json describes; raises InputError where there is none."""
    write: Callable[[ModelConfig], dict[str, Any]]
    """The inverse, without `architectures`, `model_type` and dtype."""
    table: Callable[[ModelConfig], Table]
    prefix: str
    """What tensor names begin with unless they were saved without the head."""
    aliases: Mapping[str, str] = field(default_factory=dict)
    """Other names of keys, which transformers understands as well -> the names in `defaults`."""
    heads: frozenset[str] = frozenset({"head"})
    """Parameters that a file may lack."""
    twins: Mapping[str, str] = field(default_factory=dict)
    """Tensors that some files hold a second time, and their names: as such they are never read."""

    def described(self, values: Mapping[str, Any], tensors: Collection[str] = ()) -> ModelConfig:
        """The model that a config.json describes, which lies beside tensors of these names.

        Raises:
            InputError: it describes none, or one that has no counterpart here.
        """
        for key in ("quantization_config", "per_layer_config"):
            if values.get(key):
                raise InputError(f"config.json: there is a {key}, which megajax lacks: save the model without it")
        try:
            model = self.read(Settings(values, self.defaults, self.aliases, tensors))
        except ValidationError as error:
            problem = error.errors()[0]
            where = ".".join(map(str, problem["loc"]))
            raise InputError(f"config.json: {problem['input']!s:.60} for {where}: {problem['msg']}") from None
        if values.get("is_causal") not in (None, model_class(model).causal):
            raise InputError(f"config.json: is_causal is {values['is_causal']}, which no {self.model_type} is here")
        if model.head_size == 0:
            raise InputError(f"config.json: {model.num_heads} heads in a width of {model.hidden_size}: correct them")
        return model
