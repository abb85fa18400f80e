"""The whole configuration of a run. Only entry points receive it; each part goes to the component it is for."""

from __future__ import annotations

from pydantic import Field

from megajax.config.base import PathName, component
from megajax.config.cluster import ClusterConfig
from megajax.config.data import DataConfig, TokenizerConfig
from megajax.config.model import ModelConfig
from megajax.config.optim import OptimConfig
from megajax.config.parallel import ParallelConfig
from megajax.config.train import (
    CheckpointConfig,
    EvalConfig,
    HealthConfig,
    LogConfig,
    LossScaleConfig,
    ProfileConfig,
    TrainConfig,
)


@component
class Config:
    """One run: what `python -m megajax.train` needs to know."""

    output_dir: PathName = "runs/default"
    """Where everything of the run is written: config, data, checkpoints, metrics."""
    init_from: PathName | None = None
    """Run or Hugging Face directory whose weights training starts from; its architecture and tokenizer are defaults."""
    model: ModelConfig = Field(default_factory=ModelConfig)
    """Architecture."""
    tokenizer: TokenizerConfig = Field(default_factory=TokenizerConfig)
    """Text to ids."""
    data: DataConfig = Field(default_factory=DataConfig)
    """Sources and samples."""
    train: TrainConfig = Field(default_factory=TrainConfig)
    """Length, batch, precision."""
    optim: OptimConfig = Field(default_factory=OptimConfig)
    """Update rule and schedule."""
    loss_scale: LossScaleConfig = Field(default_factory=LossScaleConfig)
    """fp16 loss scaling."""
    health: HealthConfig = Field(default_factory=HealthConfig)
    """Bad steps."""
    parallel: ParallelConfig = Field(default_factory=ParallelConfig)
    """Mesh."""
    cluster: ClusterConfig = Field(default_factory=ClusterConfig)
    """Processes."""
    checkpoint: CheckpointConfig = Field(default_factory=CheckpointConfig)
    """Saving."""
    evaluation: EvalConfig = Field(default_factory=EvalConfig)
    """Held-out loss."""
    log: LogConfig = Field(default_factory=LogConfig)
    """Reporting."""
    profile: ProfileConfig = Field(default_factory=ProfileConfig)
    """Tracing."""
