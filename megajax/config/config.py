"""Configuration of a run as a whole, with the components for processes, checkpoints, reports and traces."""

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
    """The way in which the processes of a run find each other, and the time after which one counts as lost."""

    coordinator: str | None = None
    """HOST:PORT of process 0; unset = what the launcher's environment says (SLURM, Open MPI, Kubernetes, torchrun)."""
    processes: PositiveInt | None = None
    """Number of processes of the run; it goes together with `coordinator`."""
    process: NonNegativeInt | None = None
    """Number of this process, counted from 0; it goes together with `coordinator`."""
    start_seconds: PositiveInt = 60
    """Seconds within which all processes have to appear and agree on versions and configuration."""
    heartbeat_seconds: PositiveInt = 20
    """Seconds without a sign of life after which a process counts as lost and the job ends."""
    hang_seconds: PositiveInt | None = 600
    """Longest time in seconds without progress in the training loop, ten times as long for a compilation, an
    evaluation, a save, a restore or the first weights; then every stack is printed and the process ends. Unset = wait
    for ever."""


@component
class CheckpointConfig:
    """Say when checkpoints are saved, where, and which are kept."""

    every: Annotated[PositiveInt | None, Elsewhere("save_interval save_steps")] = None
    """Number of steps between checkpoints; unset = save only at the end."""
    keep_last: Annotated[PositiveInt, Elsewhere("save_total_limit most_recent_k")] = 2
    """Number of the newest checkpoints that are kept."""
    keep_every: Annotated[PositiveInt | None, Elsewhere("save_retain_interval")] = None
    """Keep every checkpoint whose step is a multiple of this number as well; unset = none of them."""
    keep_best: bool = False
    """Keep the checkpoint of the lowest validation loss as one of those (the newest is kept too, even if `keep_last` is
    1)."""
    asynchronous: Annotated[bool, Elsewhere("async_save=true")] = True
    """Write checkpoints in the background while training goes on."""
    directory: PathName | None = None
    """Directory of the checkpoints, a path or an object store's (gs://...); unset = OUTPUT_DIR/checkpoints."""
    local: PathName | None = None
    """Fast directory on every host for extra copies in between, which a run resumes from if they are newer and
    complete."""
    local_every: Annotated[PositiveInt | None, Elsewhere("non_persistent_save_interval")] = None
    """Number of steps between these copies."""

    def __post_init__(self) -> None:
        """Refuse a directory for local copies without their interval, and the other way round."""
        if (self.local is None) != (self.local_every is None):
            raise InputError("checkpoint.local and checkpoint.local_every belong together: set both, or neither")


@component
class EvalConfig:
    """Say when the loss is measured on held-out text, and on how much of it."""

    every: Annotated[PositiveInt | None, Elsewhere("eval_interval eval_steps")] = None
    """Number of steps between evaluations; unset = evaluate only at the end."""
    steps: Annotated[NonNegativeInt, Elsewhere("eval_iters")] = 10
    """Number of batches of an evaluation; 0 = no evaluation."""


@component
class LogConfig:
    """Say what is reported, and where."""

    every: Annotated[PositiveInt, Elsewhere("log_interval logging_steps")] = 10
    """Number of steps between log lines."""
    tensorboard: Annotated[bool, Elsewhere("tensorboard_dir=true")] = True
    """Write TensorBoard events into OUTPUT_DIR/tensorboard."""
    wandb_project: str | None = None
    """Name of the Weights & Biases project that gets the metrics, which needs the wandb package; unset = none."""
    prometheus_port: PositiveInt | None = None
    """Port of process 0 on which the metrics are served to Prometheus, which needs the prometheus-client package; unset
    = none."""
    params_norm: Annotated[bool, Elsewhere("log_params_norm=true")] = False
    """Log the L2 norm of all parameters."""
    peak_tflops: NonNegativeFloat | None = None
    """Dense peak TFLOP/s of one device, of which the MFU is a share; unset = the table of known GPUs, or a measured
    matmul on CPU."""
    sample_prompt: str | None = None
    """Text that the model continues when training ends; unset = none."""
    sample_tokens: Annotated[PositiveInt, Needs("log.sample_prompt")] = 64
    """Number of tokens of that continuation."""

    def __post_init__(self) -> None:
        """Refuse the length of a continuation that is not asked for."""
        refuse_ignored("log", self)


@component
class ProfileConfig:
    """Say which steps are traced for TensorBoard or XProf, into OUTPUT_DIR/profile."""

    start: Annotated[PositiveInt | None, Elsewhere("profile_step_start")] = None
    """First step that is traced; unset = none."""
    stop: Annotated[PositiveInt | None, Elsewhere("profile_step_end")] = None
    """Last step that is traced; unset = two steps after the first."""


@component
class Config:
    """Configuration of one run, which is all that `python -m megajax.train` needs to know."""

    output_dir: Annotated[PathName, Elsewhere("save load")] = "runs/default"
    """Directory into which the run writes everything: configuration, data, checkpoints, metrics."""
    init_from: Annotated[PathName | None, Elsewhere("pretrained_checkpoint finetune no_load_optim no_load_rng")] = None
    """Run or Hugging Face directory whose weights training starts from; its architecture and tokenizer become the
    defaults."""
    model: ModelConfig = Field(default_factory=ModelConfig)
    """Architecture of the model."""
    tokenizer: TokenizerConfig = Field(default_factory=TokenizerConfig)
    """Tokenizer that turns text into ids."""
    data: DataConfig = Field(default_factory=DataConfig)
    """Sources of text, and how samples are made of them."""
    train: TrainConfig = Field(default_factory=TrainConfig)
    """Length of the run, batch sizes, precision and memory."""
    optim: OptimConfig = Field(default_factory=OptimConfig)
    """Update rule and its schedule."""
    loss_scale: LossScaleConfig = Field(default_factory=LossScaleConfig)
    """Loss scaling for fp16."""
    health: HealthConfig = Field(default_factory=HealthConfig)
    """Handling of bad steps."""
    parallel: ParallelConfig = Field(default_factory=ParallelConfig)
    """Sizes of the mesh axes."""
    cluster: ClusterConfig = Field(default_factory=ClusterConfig)
    """Processes of the run."""
    checkpoint: CheckpointConfig = Field(default_factory=CheckpointConfig)
    """Saving of checkpoints."""
    evaluation: EvalConfig = Field(default_factory=EvalConfig)
    """Evaluation on held-out text."""
    log: LogConfig = Field(default_factory=LogConfig)
    """Reports and where they go."""
    profile: ProfileConfig = Field(default_factory=ProfileConfig)
    """Traces of some steps."""
