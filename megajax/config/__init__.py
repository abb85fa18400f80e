"""Configuration of a run: each component is a frozen dataclass, read from YAML and `key=value` words, and checked when
it is built.

`megajax.config.cli` holds the command line. Importing this package does not import JAX.
"""

from megajax.config.base import InputError
from megajax.config.checks import check_batch, check_config, check_training
from megajax.config.config import (
    CheckpointConfig,
    ClusterConfig,
    Config,
    EvalConfig,
    LogConfig,
    ProfileConfig,
)
from megajax.config.data import DataConfig, TokenizerConfig
from megajax.config.load import Loaded, dump_config, load_config
from megajax.config.model import ModelConfig
from megajax.config.parallel import ParallelConfig, resolve_mesh
from megajax.config.train import HealthConfig, LossScaleConfig, OptimConfig, TrainConfig

__all__ = [
    "CheckpointConfig",
    "ClusterConfig",
    "Config",
    "DataConfig",
    "EvalConfig",
    "HealthConfig",
    "InputError",
    "Loaded",
    "LogConfig",
    "LossScaleConfig",
    "ModelConfig",
    "OptimConfig",
    "ParallelConfig",
    "ProfileConfig",
    "TokenizerConfig",
    "TrainConfig",
    "check_batch",
    "check_config",
    "check_training",
    "dump_config",
    "load_config",
    "resolve_mesh",
]
