"""Configuration of a training step: batch sizes, precision and memory, the update rule and its schedule, bad steps."""

from __future__ import annotations

import difflib
from typing import Annotated, Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from megajax.config.base import BelowOne, Elsewhere, Fraction, InputError, component
from megajax.config.needs import Needs, refuse_ignored, require_multiple

ACTIVATION_NAMES = (
    "block_input", "attention_residual", "qkv", "attention_out", "mlp_hidden", "branch_output", "mlp_residual"
)  # fmt: skip
"""Names of a block's activations that `train.remat` can keep. branch_output exists with `model.branch_norm`; the last
one is the next block's input if norms come first."""
ADAM_OR_LION = Needs("optim.name", ("adamw", "lion", "muon"))
DECAY = Needs("optim.decay_style", ("linear", "cosine", "inverse_sqrt", "wsd"))
DECAY_LENGTH = DECAY._replace(others=("optim.warmup_fraction",))
WARMUP = Needs("optim.warmup_steps", others=("optim.warmup_samples", "optim.warmup_fraction"))
WSD = Needs("optim.decay_style", ("wsd",))
FP16 = Needs("train.precision", ("fp16",))
DYNAMIC = Needs("loss_scale.constant", (None,))


@component
class TrainConfig:
    """Length of the training, samples of a step, and precision."""

    steps: Annotated[PositiveInt | None, Elsewhere("train_iters max_steps")] = None
    """Length of the run in optimizer steps."""
    samples: Annotated[PositiveInt | None, Elsewhere("train_samples")] = None
    """Length of the run in samples, instead of steps; a batch-size ramp-up needs it."""
    global_batch_size: Annotated[PositiveInt, Elsewhere("batch_size")] = 8
    """Number of samples in a step, over all devices."""
    micro_batch_size: Annotated[int, Elsewhere("per_device_train_batch_size")] = 1
    """Number of samples that one data-parallel replica (data x fsdp x expert) pushes through the model at a time."""
    rampup: Annotated[tuple[PositiveInt, PositiveInt, PositiveInt] | None, Elsewhere("rampup_batch_size")] = None
    """Batch-size ramp-up: start, increment, and samples that it takes (Megatron's --rampup-batch-size)."""
    seed: Annotated[int, Field(ge=0, lt=2**32)] = 1234
    """Seed of the initial weights, the order of samples and dropout."""
    precision: Annotated[Literal["fp32", "bf16", "fp16"], Elsewhere("bf16=bf16 fp16=fp16 dtype")] = "fp32"
    """Numbers of the forward and backward pass; weights at rest, gradients and optimizer state stay fp32."""
    remat: Annotated[
        Literal["none", "selective", "full"] | tuple[str, ...],
        Elsewhere(
            "recompute_granularity recompute_activations=selective recompute_modules gradient_checkpointing=full"
        ),
    ] = "selective"
    """Activations that the backward pass recomputes: none, all but some named ones (selective), or all but block inputs
    (full); a list names the activations to keep."""
    deterministic: Annotated[bool, Elsewhere("deterministic_mode=true")] = False
    """Use GPU kernels that give the same bits every time, which are slower; on CPUs it is always so."""
    exit_duration: Annotated[PositiveFloat | None, Elsewhere("exit_duration_in_mins")] = None
    """Minutes after which the run saves and ends, to be started again; unset = never."""
    attention: Annotated[
        Literal["auto", "xla", "cudnn", "ring"], Elsewhere("attention_backend use_flash_attn attn_implementation")
    ] = "auto"
    """Attention kernel: auto = cudnn on GPUs in bf16/fp16, and xla otherwise; ring = keys and values travel round the
    context shards instead of being gathered. A kernel that is named and cannot run is an error."""

    def __post_init__(self) -> None:
        """Refuse batch sizes, lengths and names of activations that do not fit together."""
        micro, size = self.micro_batch_size, self.global_batch_size
        if not 1 <= micro <= size:
            raise InputError(f"train.micro_batch_size is {micro}: use 1 to {size}, the train.global_batch_size")
        if self.rampup is not None:
            start, increment, _ = self.rampup
            if start > size:
                raise InputError(f"train.rampup starts at {start}, above train.global_batch_size {size}")
            way, remedy = f"train.rampup: {size} - {start} =", "the last one has to end at the global batch size"
            require_multiple(way, size - start, "the increment", increment, remedy)
            if self.samples is None:
                raise InputError("train.rampup needs a run counted in samples: set train.samples, not train.steps")
        for name in () if isinstance(self.remat, str) else self.remat:
            if name not in ACTIVATION_NAMES:
                near = difflib.get_close_matches(name, ACTIVATION_NAMES, n=1)
                hint = f"did you mean {near[0]}?" if near else f"the names are {', '.join(ACTIVATION_NAMES)}"
                raise InputError(f"train.remat: no activation is called {name}: {hint}")
        if self.steps is not None and self.samples is not None:
            raise InputError(f"train.steps {self.steps} and train.samples {self.samples} are both set: keep one")


@component
class OptimConfig:
    """The update rule and its schedule. Counts are in steps, or in samples where the name says so."""

    name: Annotated[Literal["adamw", "sgd", "lion", "muon"], Elsewhere("optimizer")] = "adamw"
    """Update rule; muon applies to the matrices of the blocks, and adamw to everything else then."""
    lr: Annotated[PositiveFloat, Elsewhere("learning_rate")] = 3e-4
    """Peak learning rate."""
    min_lr: Annotated[NonNegativeFloat, DECAY] = 0.0
    """Learning rate after the decay."""
    weight_decay: NonNegativeFloat = 0.01
    """Decoupled weight decay, which applies to matrices and embeddings only."""
    beta1: Annotated[BelowOne, ADAM_OR_LION, Elsewhere("adam_beta1")] = 0.9
    """Decay of the first moment (adamw, lion, muon's adamw part)."""
    beta2: Annotated[BelowOne, ADAM_OR_LION, Elsewhere("adam_beta2")] = 0.999
    """Decay of the second moment (adamw); for lion, of its momentum."""
    eps: Annotated[PositiveFloat, Needs("optim.name", ("adamw", "muon")), Elsewhere("adam_eps adam_epsilon")] = 1e-8
    """Number that is added to the root of the second moment."""
    momentum: Annotated[BelowOne, Needs("optim.name", ("sgd", "muon")), Elsewhere("sgd_momentum")] = 0.9
    """Momentum of sgd and muon."""
    clip_grad: Annotated[NonNegativeFloat, Elsewhere("max_grad_norm gradient_clip_val")] = 1.0
    """Largest global L2 norm of the gradient; 0 = gradients are not clipped."""
    decay_style: Annotated[
        Literal["constant", "linear", "cosine", "inverse_sqrt", "wsd"], Elsewhere("lr_decay_style lr_scheduler_type")
    ] = "linear"
    """Shape of the schedule after warm-up."""
    warmup_init_lr: Annotated[NonNegativeFloat, WARMUP, Elsewhere("lr_warmup_init")] = 0.0
    """Learning rate at the start of warm-up."""
    warmup_steps: Annotated[NonNegativeInt, Elsewhere("lr_warmup_iters")] = 0
    """Length of a linear warm-up in steps, whatever batch sizes the run has."""
    warmup_samples: Annotated[NonNegativeInt, Elsewhere("lr_warmup_samples")] = 0
    """Length of a linear warm-up in samples."""
    warmup_fraction: Annotated[Fraction | None, Elsewhere("lr_warmup_fraction warmup_ratio")] = None
    """Length of a linear warm-up as a share of the decay."""
    decay_steps: Annotated[PositiveInt | None, DECAY_LENGTH, Elsewhere("lr_decay_iters")] = None
    """Number of steps until min_lr is reached, warm-up included; unset = the whole run."""
    decay_samples: Annotated[PositiveInt | None, DECAY_LENGTH, Elsewhere("lr_decay_samples")] = None
    """Number of samples until min_lr is reached, warm-up included; unset = the whole run."""
    wsd_steps: Annotated[PositiveInt | None, WSD, Elsewhere("lr_wsd_decay_iters")] = None
    """Length of the final decay of wsd, in steps."""
    wsd_samples: Annotated[PositiveInt | None, WSD, Elsewhere("lr_wsd_decay_samples")] = None
    """Length of the final decay of wsd, in samples."""
    wsd_style: Annotated[
        Literal["linear", "cosine", "exponential", "minus_sqrt"], WSD, Elsewhere("lr_wsd_decay_style")
    ] = "exponential"
    """Shape of the final decay of wsd."""

    def __post_init__(self) -> None:
        """Refuse rates and lengths that contradict one another, and those that the update rule or the style ignores."""
        refuse_ignored("optim", self)
        warmups = [key for key in ("warmup_steps", "warmup_samples", "warmup_fraction") if getattr(self, key)]
        if len(warmups) > 1:
            raise InputError(" and ".join(f"optim.{key}" for key in warmups) + " are both set: keep one")
        for key in ("min_lr", "warmup_init_lr"):
            if getattr(self, key) > self.lr:
                raise InputError(f"optim.{key} {getattr(self, key)} is above optim.lr {self.lr}")
        if self.decay_style == "wsd" and self.wsd_steps is None and self.wsd_samples is None:
            raise InputError(
                "optim.decay_style wsd needs the length of its last part: set optim.wsd_steps or wsd_samples"
            )


@component
class LossScaleConfig:
    """Set the loss scaling for fp16, whose defaults are Megatron's."""

    constant: Annotated[PositiveFloat | None, FP16, Elsewhere("loss_scale")] = None
    """Fixed scale, instead of a dynamic one; unset = dynamic."""
    initial: Annotated[PositiveFloat, FP16, DYNAMIC, Elsewhere("initial_loss_scale")] = 2.0**32
    """Scale at the start."""
    minimum: Annotated[PositiveFloat, FP16, DYNAMIC, Elsewhere("min_loss_scale")] = 1.0
    """Smallest scale."""
    window: Annotated[PositiveInt, FP16, DYNAMIC, Elsewhere("loss_scale_window")] = 1000
    """Number of steps without an overflow after which the scale doubles."""
    hysteresis: Annotated[PositiveInt, FP16, DYNAMIC] = 2
    """Number of overflows after which the scale halves."""
    max_skips_at_minimum: Annotated[PositiveInt, FP16] = 10
    """Number of skipped steps in a row, at the smallest scale, after which the run stops with an error."""

    def __post_init__(self) -> None:
        """Refuse values that a constant scale ignores."""
        refuse_ignored("loss_scale", self)


@component
class HealthConfig:
    """Say what a bad step is (loss or gradient is not finite, or the loss is a spike), and what follows it."""

    policy: Literal["stop", "skip", "rollback"] = "stop"
    """Reaction to a bad step, which changes no weight: end the run (stop), go on with the next batch (skip), or return
    to the newest checkpoint and go on behind the bad step, leaving out the data in between (rollback)."""
    spike_factor: Annotated[PositiveFloat | None, Elsewhere("check_for_spiky_loss")] = None
    """Factor of its running mean above which a loss is a spike, more than 1; unset = no loss is."""
    window: Annotated[PositiveInt, Needs("health.spike_factor")] = 100
    """Number of good steps that the running mean is taken over, and that pass before a spike can be told."""
    patience: Annotated[PositiveInt, Needs("health.policy", ("skip", "rollback"))] = 10
    """Number of bad steps in a row (skip), or of returns to the same checkpoint (rollback), after which the run ends
    all the same."""

    def __post_init__(self) -> None:
        """Refuse values that the policy ignores, and a factor under which every loss would be a spike."""
        refuse_ignored("health", self)
        if self.spike_factor is not None and self.spike_factor <= 1:
            raise InputError(f"health.spike_factor is {self.spike_factor}: a spike is above 1 x the mean")
