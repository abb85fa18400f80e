"""What a device has to hold, in closed form.

Shapes: B samples of a micro batch, S sequence, V padded vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping

from megajax.config.config import Config
from megajax.models.cross_entropy import CHUNK_LOGITS
from megajax.models.sizes import parameter_count

GIB = 2**30
MOMENTS = {"adamw": 2, "muon": 2, "lion": 1, "sgd": 1}
"""fp32 numbers that an optimizer keeps per weight (muon: at most)."""


def state_bytes(config: Config, mesh: Mapping[str, int]) -> float:
    """Mean bytes of a device for fp32 weights, gradients and optimizer state.

    Args:
        config: with a known vocabulary.
        mesh: size of every axis.
    """
    shards = mesh["pipe"] * mesh["fsdp"] * mesh["tensor"]
    at_rest = shards * (mesh["data"] if config.parallel.zero else 1)
    return parameter_count(config.model) * (4 * (1 + MOMENTS[config.optim.name]) / at_rest + 4 / shards)


def logits_bytes(config: Config, mesh: Mapping[str, int]) -> int:
    """fp32 logits [B, S, V] of a micro batch, were they held all at once; their gradient is as large again."""
    tokens = config.train.micro_batch_size * config.data.seq_length // mesh["context"]
    return 4 * tokens * config.model.padded_vocab_size // (mesh["pipe"] * mesh["tensor"])


def describe_logits(config: Config, mesh: Mapping[str, int], memory: float | None) -> str:
    """How many logits are held, and how many there would be without the chunks of `models.cross_entropy`.

    Args:
        config: with a known vocabulary.
        mesh: size of every axis.
        memory: bytes of a device; None = unknown.
    """
    whole = logits_bytes(config, mesh)
    chunk = min(4 * CHUNK_LOGITS, whole)
    text = f"in chunks of {chunk / GIB:.3f} GiB a device"
    if memory is not None and chunk < whole and 2 * whole > memory:
        text += (
            f": {whole:,} bytes for a whole micro batch, and as many for their gradient, do not fit in "
            f"{memory / GIB:.1f} GiB without a chunked loss or a smaller train.micro_batch_size"
        )
    return text
