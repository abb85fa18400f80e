"""Length of the run, batch sizes, numbers and memory of the training step."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from megajax.config.base import PathName, component

ACTIVATION_NAMES = ("block_input", "attention_residual", "qkv", "attention_out", "mlp_hidden", "mlp_residual")
"""Activations of a block that `train.remat` can keep (the last one is the next block's input if norms come first)."""


@component
class TrainConfig:
    """How long, how many at a time, in which precision."""

    steps: PositiveInt | None = None
    """Length of the run in optimizer steps."""
    samples: PositiveInt | None = None
    """Length of the run in samples, instead of steps (needed with a batch-size ramp-up)."""
    global_batch_size: PositiveInt = 8
    """Samples per step, over all devices."""
    micro_batch_size: int = 1
    """Samples that one data-parallel replica (data x fsdp) pushes through the model at a time."""
    rampup: tuple[PositiveInt, PositiveInt, PositiveInt] | None = None
    """Batch-size ramp-up (start, increment, samples), Megatron's --rampup-batch-size."""
    seed: Annotated[int, Field(ge=0, lt=2**32)] = 1234
    """Initial weights, sample order and dropout all follow from it."""
    precision: Literal["fp32", "bf16", "fp16"] = "fp32"
    """Numbers of the forward and backward pass; weights at rest, gradients and optimizer stay fp32."""
    remat: Literal["none", "selective", "full"] | tuple[str, ...] = "selective"
    """What the backward pass recomputes: nothing, all but named activations, all but block inputs; or names to keep."""
    deterministic: bool = False
    """GPU kernels that give the same bits every time; slower. CPUs always do."""
    exit_duration: PositiveFloat | None = None
    """Minutes after which the run saves and ends, to be started again; unset = never."""
    attention: Literal["auto", "xla", "cudnn", "ring"] = "auto"
    """Attention kernel; auto = cudnn on GPUs in bf16/fp16, else xla; ring = keys and values travel round the context
    shards instead of being gathered. A forced kernel that cannot run is an error."""


@component
class LossScaleConfig:
    """Loss scaling for fp16 (Megatron's constants)."""

    constant: PositiveFloat | None = None
    """Fixed scale instead of a dynamic one."""
    initial: PositiveFloat = 2.0**32
    """First scale."""
    minimum: PositiveFloat = 1.0
    """Smallest scale."""
    window: PositiveInt = 1000
    """Clean steps before the scale doubles."""
    hysteresis: PositiveInt = 2
    """Overflows before the scale halves."""
    max_skips_at_minimum: PositiveInt = 10
    """Skipped steps in a row at the smallest scale after which the run stops with an error."""


@component
class HealthConfig:
    """What a bad step is, and what follows: one whose loss or gradient is not finite, or whose loss is a spike."""

    policy: Literal["stop", "skip", "rollback"] = "stop"
    """A bad step changes no weight. Then: end the run; go on with the next batch; or return to the newest checkpoint
    and go on behind the bad step, leaving out the data in between."""
    spike_factor: PositiveFloat | None = None
    """A loss above this many times its running mean is a spike; unset = none is."""
    window: PositiveInt = 100
    """Good steps that the running mean is over, and that pass before a spike can be told."""
    patience: PositiveInt = 10
    """Bad steps in a row (skip), or returns to the same checkpoint (rollback), before the run ends all the same."""


@component
class CheckpointConfig:
    """When to save and what to keep."""

    every: PositiveInt | None = None
    """Steps between checkpoints; unset = only at the end."""
    keep_last: PositiveInt = 2
    """Newest checkpoints kept."""
    keep_every: PositiveInt | None = None
    """Besides, keep every checkpoint whose step is a multiple of this."""
    keep_best: bool = False
    """One of those kept is the one of lowest validation loss (the newest is kept besides, even if `keep_last` is 1)."""
    asynchronous: bool = True
    """Write in the background while training goes on."""
    directory: PathName | None = None
    """Where to, a path or an object store's (gs://...); unset = OUTPUT_DIR/checkpoints."""
    local: PathName | None = None
    """A fast directory of every host's own for copies in between, resumed from if newer and complete."""
    local_every: PositiveInt | None = None
    """Steps between those copies."""


@component
class EvalConfig:
    """Loss on held-out text."""

    every: PositiveInt | None = None
    """Steps between evaluations; unset = only at the end."""
    steps: NonNegativeInt = 10
    """Batches per evaluation; 0 = no evaluation."""


@component
class LogConfig:
    """What is reported, and where."""

    every: PositiveInt = 10
    """Steps between log lines."""
    tensorboard: bool = True
    """Write TensorBoard events into OUTPUT_DIR/tensorboard."""
    wandb_project: str | None = None
    """Weights & Biases project; needs the wandb package."""
    prometheus_port: PositiveInt | None = None
    """Serve the metrics to Prometheus on this port of process 0; needs the prometheus-client package."""
    params_norm: bool = False
    """Log the L2 norm of all parameters."""
    peak_tflops: NonNegativeFloat | None = None
    """Dense peak of one device for the MFU; unset = the table of known GPUs, or a measured matmul on CPU."""
    sample_prompt: str | None = None
    """Text to continue when training ends; unset = none."""
    sample_tokens: PositiveInt = 64
    """Length of that continuation."""


@component
class ProfileConfig:
    """A trace of some steps for TensorBoard or XProf, in OUTPUT_DIR/profile."""

    start: PositiveInt | None = None
    """First step traced; unset = none."""
    stop: PositiveInt | None = None
    """Last step traced; unset = two more."""
