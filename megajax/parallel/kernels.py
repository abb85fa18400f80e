"""Which attention kernel runs. The choice is printed; a kernel that was asked for and cannot run is an error."""

from __future__ import annotations

from typing import NamedTuple

from megajax.config.base import ConfigError
from megajax.config.model import ModelConfig


class Kernel(NamedTuple):
    """The choice and its reason."""

    name: str
    reason: str


def choose_attention(wanted: str, model: ModelConfig, precision: str, isolate_documents: bool, platform: str) -> Kernel:
    """Resolve `train.attention`.

    Args:
        wanted: "auto", "xla" or "cudnn".
        model: heads and dropout.
        precision: "fp32", "bf16" or "fp16".
        isolate_documents: whether documents must not attend to each other (`data.reset_attention`).
        platform: of the devices, "gpu" or "cpu".

    Raises:
        ConfigError: cudnn is forced and cannot run.
    """
    obstacles = [
        (platform != "gpu", f"the devices are {platform}s"),
        (precision == "fp32", "cuDNN attention is bf16 and fp16 only"),
        (model.attention_dropout > 0, "cuDNN attention has no attention_dropout here"),
        (isolate_documents, "cuDNN attention has no document mask here (data.reset_attention)"),
        (
            model.head_size % 8 != 0 or model.head_size > 128,
            f"head_dim is {model.head_size}, not a multiple of 8 to 128",
        ),
    ]
    reason = next((text for obstacle, text in obstacles if obstacle), None)
    if wanted == "xla":
        return Kernel("xla", "as configured")
    if wanted == "cudnn" and reason:
        raise ConfigError(f"train.attention=cudnn cannot run: {reason}; use train.attention=auto or xla")
    return Kernel("xla", reason) if reason else Kernel("cudnn", "flash attention, no S x S array")
