"""Which attention kernel runs. The choice is printed; a kernel that was asked for and cannot run is an error."""

from __future__ import annotations

from typing import NamedTuple

from megajax.config.base import ConfigError
from megajax.config.config import Config


class Kernel(NamedTuple):
    """The choice and its reason."""

    name: str
    reason: str


def choose_attention(config: Config, platform: str) -> Kernel:
    """Resolve `train.attention` for devices of `platform` ("gpu" or "cpu").

    Raises:
        ConfigError: cudnn is forced and cannot run.
    """
    wanted, precision, model = config.train.attention, config.train.precision, config.model
    size = model.head_size
    plain = model.positions != "alibi" and model.window is None and model.attention_scale is None
    obstacles = {
        f"the devices are {platform}s": platform != "gpu",
        "cuDNN attention runs in bf16 and fp16 only": precision == "fp32",
        "attention_dropout needs the probabilities": model.attention_dropout > 0,
        "parallel.context shards attend to parts of the sequence": config.parallel.context > 1,
        "data.reset_attention needs a document mask": config.data.reset_attention,
        f"model.family {model.family} does not look at the past alone": model.family != "gpt",
        "model.window, model.attention_scale and alibi change the pattern of the attention": not plain,
        f"head_dim {size} is no multiple of 8 up to 128": size % 8 != 0 or size > 128,
    }
    reason = next((text for text, applies in obstacles.items() if applies), None)
    if wanted == "ring":
        if config.parallel.context == 1:
            raise ConfigError("train.attention=ring needs parallel.context shards: use train.attention=auto")
        if model.attention_dropout > 0:
            raise ConfigError("train.attention=ring has no attention_dropout: use train.attention=xla")
        if model.family != "gpt" or not plain:
            raise ConfigError("train.attention=ring is for plain causal attention: use train.attention=xla")
        return Kernel("ring", "as configured")
    if wanted == "xla":
        return Kernel("xla", "as configured")
    if wanted == "cudnn" and reason:
        raise ConfigError(f"train.attention=cudnn cannot run: {reason}; use train.attention=auto or xla")
    return Kernel("xla", reason) if reason else Kernel("cudnn", "flash attention: no S x S array")
