"""FLOPs of a transformer, and the time that training takes.

Model FLOPs are those that the arithmetic needs whatever the layout; hardware FLOPs include recomputation.

A multiply-add is 2 FLOPs. Only matrix products count (embedding lookup, norms, softmax and rotary embedding do not),
and the backward pass costs twice the forward pass. Two conventions for the attention scores exist, and published
numbers mix them:

- "full": all S^2 scores; the Megatron papers, Megatron-LM before core 0.12, most published MFU figures;
- "causal": half of them, as a causal kernel computes them; Megatron-LM since core 0.12.

Shapes: B batch, S sequence, D embed, N heads, K kv heads, H head dim, F mlp, V padded vocab, L layers; T = B S tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from megajax.config.model import ModelConfig
from megajax.models.families import model_class
from megajax.models.model import Stack

AttentionConvention = Literal["full", "causal"]
Remat = Literal["none", "selective", "full"]


@dataclass(frozen=True)
class Flops:
    """The FLOPs of the forward pass by part (all layers together)."""

    projections: int
    """FLOPs of query, key, value and output projections."""
    core: int
    """FLOPs of attention scores and the weighted sum of the values."""
    mlp: int
    """FLOPs of the two (gated: three) matrices of the MLP; in a mixture, of the experts that a token uses."""
    logits: int
    """FLOPs of the output matrix, and for bert of the transform before it."""

    @property
    def forward(self) -> int:
        """Return the FLOPs of one forward pass."""
        return self.projections + self.core + self.mlp + self.logits

    @property
    def model(self) -> int:
        """Return the FLOPs of forward and backward, the numerator of MFU."""
        return 3 * self.forward

    def hardware(self, remat: Remat) -> int:
        """Return the FLOPs of forward, backward and recomputation, the numerator of HFU, as the Megatron papers count
        them.

        full: one more forward of the blocks (2104.04473, eq. 3). selective: the attention core is charged once more
        with forward and backward (2205.05198, appendix A), three times the one extra forward that runs.
        """
        blocks = self.projections + self.core + self.mlp
        return self.model + {"none": 0, "selective": 3 * self.core, "full": blocks}[remat]


def count_flops(
    model: ModelConfig, batch: int, sequence: int, attention: AttentionConvention, decoder_sequence: int = 0
) -> Flops:
    """Count the FLOPs of `batch` samples of `sequence` tokens.

    For t5, `sequence` counts the tokens of the encoder, and `decoder_sequence` those of the decoder.

    For multi-head attention, F = 4 D and "full" this is 72 B L S D^2 (1 + S / 6D + V / 12DL) (2104.04473, section 5.1).
    The router of a mixture does not count, as in Megatron-LM.
    """
    family, width = model_class(model), model.hidden_size
    stacks = family.stacks(model, sequence, decoder_sequence or sequence)
    parts = (_of_stack(model, stack, batch, attention) for stack in stacks)
    projections, core, mlp = (sum(part) for part in zip(*parts, strict=True))
    rows = model.padded_vocab_size + width * family.head_transform
    return Flops(projections, core, mlp, 2 * batch * stacks[-1].sequence * width * rows)


def _of_stack(model: ModelConfig, stack: Stack, batch: int, attention: AttentionConvention) -> tuple[int, int, int]:
    """Count the FLOPs of projections, core and MLP of a stack.

    Each layer of a decoder projects keys and values of its own from the encoder's output.
    """
    width, layers, tokens = model.hidden_size, stack.layers, batch * stack.sequence
    queries, keys = model.num_heads * model.head_size, model.kv_heads * model.head_size
    projections = layers * 2 * tokens * width * (queries + 2 * keys + queries)
    core = int(layers * 4 * tokens * _keys_seen(model, stack, attention) * queries)
    if stack.memory:
        projections += layers * 2 * width * queries * 2 * (tokens + batch * stack.memory)
        core += layers * 4 * tokens * stack.memory * queries
    units = layers * model.ffn_size
    if model.experts:
        used = model.experts_per_token * model.expert_size + model.shared_ffn_size
        units = model.dense_layers * model.ffn_size + (layers - model.dense_layers) * used
    return projections, core, 2 * tokens * width * units * (3 if model.gated else 2)


def _keys_seen(model: ModelConfig, stack: Stack, attention: AttentionConvention) -> float:
    """Return the keys that a query is charged for, averaged over the layers: all keys, or those before it (in the
    window).
    """
    sequence = stack.sequence
    if attention == "full" or not stack.causal:
        return sequence
    window = min(model.window or sequence, sequence)
    near, share = window - window**2 / (2 * sequence), model.layer_kinds.count("global") / model.num_layers
    return near + share * (sequence / 2 - near) if model.layer_pattern else near


@dataclass(frozen=True)
class Budget:
    """The time that training on a number of tokens takes."""

    days: float
    gpu_hours: float


def budget(tokens: float, tokens_per_second: float, gpus: int) -> Budget:
    """Return the time for a token budget at a rate.

    With a FLOP/s rate X per GPU instead, tokens_per_second = gpus X / FLOPs per token; with hardware FLOPs of full
    recomputation this is the papers' 8 T P / n X (2104.04473, equation 4).

    Args:
        tokens: tokens of the whole run.
        tokens_per_second: rate of all GPUs together.
        gpus: number of GPUs.
    """
    hours = tokens / tokens_per_second / 3600
    return Budget(days=hours / 24, gpu_hours=hours * gpus)
