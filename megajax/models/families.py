"""Registry of the model families; everything that is special about a family is on its class (see `models.model`)."""

from __future__ import annotations

import jax

from megajax.config.data import DataConfig
from megajax.config.model import ModelConfig
from megajax.models.bert import Bert
from megajax.models.gpt import Gpt
from megajax.models.model import Model, RowArray
from megajax.models.t5 import T5

FAMILIES: dict[str, type[Model]] = {"gpt": Gpt, "bert": Bert, "t5": T5}


def model_class(config: ModelConfig) -> type[Model]:
    """Return the class of a model's family."""
    return FAMILIES[config.family]


def build_model(key: jax.Array, config: ModelConfig) -> Model:
    """Draw the weights of a model, which depend on (key, config) alone."""
    return model_class(config)(key, config)


def batch_arrays(config: ModelConfig, data: DataConfig) -> dict[str, RowArray]:
    """Return the arrays of a training batch by name (see `Model.arrays`)."""
    return model_class(config).arrays(config, data)
