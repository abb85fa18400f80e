"""What a training program does beyond the arithmetic of the model: facts about programs, no speeds.

The planner predicts MegaJAX. Measured step times are mostly Megatron-LM's; to compare with them, the same GPU constants
are used on Megatron-LM's facts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Trainer:
    """One program; `memory traffic` is bytes read and written in device memory."""

    name: str
    scans_layers: bool
    """Layers run in a `lax.scan` under `jax.checkpoint`: what is saved is copied into stacked arrays and out again,
    elementwise operations and fused attention are repeated, the last product of a block never is. Otherwise as PyTorch
    does it: nothing is copied, only what was asked for is repeated, whole blocks in full recomputation."""
    shares_vocabulary: bool
    """All pipeline stages compute embedding and head together; otherwise the first and the last do."""
    hides_tensor: Literal["nothing", "backward", "all"]
    """Behind which matrix products the collectives over `tensor` run: none; weight gradients, where nothing waits for
    them; or all, in pieces."""
    hides_neighbours: bool
    """Keys and values travel round `context`, and activations of an interleaved pipeline to the next stage, beside the
    computation."""
    hides_data: bool
    """Gradients are reduced over `data` during the last backward passes, weights gathered during the first forwards."""
    gradient_bytes: int
    """Bytes of a gradient on its way over `data`."""
    sum_bytes: int
    """Memory traffic to add a weight's gradient of one microbatch to the sum; 0 = the matrix product does it."""
    score_bytes: tuple[int, int]
    """Memory traffic of one attention score, forward and backward, where attention is not fused."""
    logit_bytes: int
    """Memory traffic of one logit, forward and backward, in head and loss."""
    fp8: bool = False
    """Matrix products of the blocks take fp8 numbers (published runs do; MegaJAX does not yet)."""


MEGAJAX = Trainer(
    name="megajax",
    scans_layers=True,
    shares_vocabulary=True,
    hides_tensor="backward",
    hides_neighbours=False,
    hides_data=False,
    gradient_bytes=4,
    sum_bytes=10,
    score_bytes=(20, 24),
    logit_bytes=24,
)
"""This repository: to add a gradient is to read bf16 and to read and write fp32; scores and softmax are fp32."""

MEGATRON = Trainer(
    name="megatron",
    scans_layers=False,
    shares_vocabulary=False,
    hides_tensor="all",
    hides_neighbours=True,
    hides_data=True,
    gradient_bytes=4,
    sum_bytes=0,
    score_bytes=(8, 14),
    logit_bytes=48,
)
"""Megatron-LM since core 0.8, with all its overlaps: fused gradient sums, 16-bit scores through a fused softmax."""
