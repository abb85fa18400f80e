"""What there is to know of a family of Hugging Face's models: its settings, and where its tensors go."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from megajax.checkpoint.hf.settings import Settings
from megajax.config.model import ModelConfig

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
    read: Callable[[Settings], ModelConfig]
    """The model that a config.json describes; raises ConfigError where there is none."""
    write: Callable[[ModelConfig], dict[str, Any]]
    """The inverse, without `architectures`, `model_type` and dtype."""
    table: Callable[[ModelConfig], Table]
    prefix: str
    """What tensor names begin with unless they were saved without the head."""
    heads: frozenset[str] = frozenset({"head"})
    """Parameters that a file may lack."""
    twins: Mapping[str, str] = field(default_factory=dict)
    """Tensors that some files hold a second time, and their names: as such they are never read."""
