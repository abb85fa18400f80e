"""The whole configuration of a run, with the components that say how a run goes: processes, saving, reports, traces."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveInt

from megajax.config.base import Elsewhere, InputError, PathName, component
from megajax.config.data import DataConfig, TokenizerConfig
from megajax.config.model import ModelConfig
from megajax.config.needs import Needs, refuse_ignored
from megajax.config.parallel import ParallelConfig
from megajax.config.train import HealthConfig, LossScaleConfig, OptimConfig, TrainConfig


@component
class ClusterConfig:
    """How the processes of a run find each other, and when one counts as lost."""

    coordinator: str | None = None
    """HOST:PORT of process 0; unset = what the launcher's environment says (SLURM, Open MPI, Kubernetes, torchrun)."""
    processes: PositiveInt | None = None
    """How many processes, together with `coordinator`."""
    process: NonNegativeInt | None = None
    """Number of this one, from 0, together with `coordinator`."""
    start_seconds: PositiveInt = 60
    """For all processes to appear and to agree on versions and configuration."""
    heartbeat_seconds: PositiveInt = 20
    """A process that was not heard of for so long is lost, and the job ends."""
    hang_seconds: PositiveInt | None = 600
    """Longest time without progress in the training loop, ten times as long for a compilation, an evaluation, a save, a
    restore or the first weights; then every stack is printed and the process ends. Unset = for ever."""


@component
class CheckpointConfig:
    """When to save and what to keep."""

    every: Annotated[PositiveInt | None, Elsewhere("save_interval save_steps")] = None
    """Steps between checkpoints; unset = only at the end."""
    keep_last: Annotated[PositiveInt, Elsewhere("save_total_limit most_recent_k")] = 2
    """Newest checkpoints kept."""
    keep_every: Annotated[PositiveInt | None, Elsewhere("save_retain_interval")] = None
    """Besides, keep every checkpoint whose step is a multiple of this."""
    keep_best: bool = False
    """One of those kept is the one of lowest validation loss (the newest is kept besides, even if `keep_last` is 1)."""
    asynchronous: Annotated[bool, Elsewhere("async_save=true")] = True
    """Write in the background while training goes on."""
    directory: PathName | None = None
    """Where to, a path or an object store's (gs://...); unset = OUTPUT_DIR/checkpoints."""
    local: PathName | None = None
    """A fast directory of every host's own for copies in between, resumed from if newer and complete."""
    local_every: Annotated[PositiveInt | None, Elsewhere("non_persistent_save_interval")] = None
    """Steps between those copies."""

    def __post_init__(self) -> None:
        """Refuse half of what local copies need."""
        if (self.local is None) != (self.local_every is None):
            raise InputError("checkpoint.local and checkpoint.local_every belong together: set both, or neither")


@component
class EvalConfig:
    """Loss on held-out text."""

    every: Annotated[PositiveInt | None, Elsewhere("eval_interval eval_steps")] = None
    """Steps between evaluations; unset = only at the end."""
    steps: Annotated[NonNegativeInt, Elsewhere("eval_iters")] = 10
    """Batches per evaluation; 0 = no evaluation."""


@component
class LogConfig:
    """What is reported, and where."""

    every: Annotated[PositiveInt, Elsewhere("log_interval logging_steps")] = 10
    """Steps between log lines."""
    tensorboard: Annotated[bool, Elsewhere("tensorboard_dir=true")] = True
    """Write TensorBoard events into OUTPUT_DIR/tensorboard."""
    wandb_project: str | None = None
    """Weights & Biases project; needs the wandb package."""
    prometheus_port: PositiveInt | None = None
    """Serve the metrics to Prometheus on this port of process 0; needs the prometheus-client package."""
    params_norm: Annotated[bool, Elsewhere("log_params_norm=true")] = False
    """Log the L2 norm of all parameters."""
    peak_tflops: NonNegativeFloat | None = None
    """Dense peak of one device for the MFU; unset = the table of known GPUs, or a measured matmul on CPU."""
    sample_prompt: str | None = None
    """Text to continue when training ends; unset = none."""
    sample_tokens: Annotated[PositiveInt, Needs("log.sample_prompt")] = 64
    """Length of that continuation."""

    def __post_init__(self) -> None:
        """Refuse the length of a text that is not asked for."""
        refuse_ignored("log", self)


@component
class ProfileConfig:
    """A trace of some steps for TensorBoard or XProf, in OUTPUT_DIR/profile."""

    start: Annotated[PositiveInt | None, Elsewhere("profile_step_start")] = None
    """First step traced; unset = none."""
    stop: Annotated[PositiveInt | None, Elsewhere("profile_step_end")] = None
    """Last step traced; unset = two more."""


@component
class Config:
    """One run: what `python -m megajax.train` needs to know."""

    output_dir: Annotated[PathName, Elsewhere("save load")] = "runs/default"
    """Where everything of the run is written: config, data, checkpoints, metrics."""
    init_from: Annotated[PathName | None, Elsewhere("pretrained_checkpoint finetune no_load_optim no_load_rng")] = None
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
