"""The model families by name."""

from __future__ import annotations

import jax

from megajax.config.base import InputError
from megajax.config.model import ModelConfig
from megajax.models.bert import Bert
from megajax.models.gpt import Gpt
from megajax.models.model import Model
from megajax.models.t5 import T5

FAMILIES: dict[str, type[Model]] = {"gpt": Gpt, "bert": Bert, "t5": T5}


def build_model(key: jax.Array, config: ModelConfig) -> Model:
    """Draw the weights of a model; they depend on (key, config) alone."""
    if config.family not in FAMILIES:
        raise InputError(f"model.family {config.family} is not available yet")
    return FAMILIES[config.family](key, config)
