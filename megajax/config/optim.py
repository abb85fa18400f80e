"""Optimizer, learning-rate schedule and gradient clipping."""

from __future__ import annotations

from typing import Literal

from pydantic import NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from megajax.config.base import BelowOne, Fraction, component


@component
class OptimConfig:
    """The update rule and its schedule. Counts are in steps, or in samples where the name says so."""

    name: Literal["adamw", "sgd", "lion", "muon"] = "adamw"
    """Update rule. muon applies to the matrices of the blocks; everything else then uses adamw."""
    lr: PositiveFloat = 3e-4
    """Peak learning rate."""
    min_lr: NonNegativeFloat = 0.0
    """Learning rate after the decay."""
    weight_decay: NonNegativeFloat = 0.01
    """Decoupled weight decay, on matrices and embeddings only."""
    beta1: BelowOne = 0.9
    """First-moment decay (adamw, lion, muon's adamw part)."""
    beta2: BelowOne = 0.999
    """Second-moment decay (adamw; for lion, the decay of its momentum)."""
    eps: PositiveFloat = 1e-8
    """Added to the root of the second moment."""
    momentum: BelowOne = 0.9
    """Momentum of sgd and muon."""
    clip_grad: NonNegativeFloat = 1.0
    """Largest global L2 norm of the gradient; 0 = no clipping."""
    decay_style: Literal["constant", "linear", "cosine", "inverse_sqrt", "wsd"] = "linear"
    """Shape of the schedule after warm-up."""
    warmup_init_lr: NonNegativeFloat = 0.0
    """Learning rate at the start of warm-up."""
    warmup_steps: NonNegativeInt = 0
    """Linear warm-up, in steps, whatever batch sizes the run has."""
    warmup_samples: NonNegativeInt = 0
    """Linear warm-up, in samples."""
    warmup_fraction: Fraction | None = None
    """Linear warm-up, as a share of the decay."""
    decay_steps: PositiveInt | None = None
    """Steps until min_lr, warm-up included; unset = the whole run."""
    decay_samples: PositiveInt | None = None
    """The same in samples."""
    wsd_steps: PositiveInt | None = None
    """Length of the final decay of wsd, in steps."""
    wsd_samples: PositiveInt | None = None
    """The same in samples."""
    wsd_style: Literal["linear", "cosine", "exponential", "minus_sqrt"] = "exponential"
    """Shape of the final decay of wsd."""
