"""Choice of the attention kernel, from the needs of the model's attention calls for the arrays of a batch.

The choice is printed. A kernel that the configuration forces and that cannot run is an error.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp

from megajax.config.base import InputError
from megajax.config.config import Config
from megajax.config.model import ModelConfig
from megajax.models.attention_kernels import CUDNN_CAN, Drop, Need, Pattern, lacking, needs_of
from megajax.models.experts import Weights
from megajax.models.families import build_model
from megajax.models.layout import Layout
from megajax.models.losses import Losses
from megajax.parallel.context import RING_CAN


class Kernel(NamedTuple):
    """The attention kernel that was chosen, and the reason."""

    name: str
    reason: str


class Array(Protocol):
    """One sample's part of an array of a batch."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Return the shape without the batch dimension."""

    @property
    def dtype(self) -> Any:
        """Return the dtype of the array."""


def choose_attention(config: Config, platform: str, arrays: Mapping[str, Array]) -> Kernel:
    """Resolve `train.attention` for devices of `platform` ("gpu" or "cpu") and batches of these `arrays`.

    Raises:
        InputError: a kernel is forced and cannot run.
    """
    wanted, context, head_dim = config.train.attention, config.parallel.context, config.model.head_size
    if wanted == "xla":
        return Kernel("xla", "as configured")
    shapes = tuple((name, tuple(array.shape), str(jnp.dtype(array.dtype))) for name, array in arrays.items())
    needs = attention_needs(config.model, shapes)
    if wanted == "ring":
        reason = "there is one context shard (parallel.context)" if context == 1 else lacking(needs, RING_CAN)
        if reason:
            raise InputError(f"train.attention=ring cannot run: {reason}; use train.attention=auto or xla")
        return Kernel("ring", "as configured")
    obstacles = {
        f"the devices are {platform}s": platform != "gpu",
        "cuDNN attention runs in bf16 and fp16 only": config.train.precision == "fp32",
        "parallel.context shards attend to parts of the sequence": context > 1,
        f"head_dim {head_dim} is no multiple of 8 up to 128": head_dim % 8 != 0 or head_dim > 128,
    }
    reason = next((text for text, applies in obstacles.items() if applies), lacking(needs, CUDNN_CAN))
    if wanted == "cudnn" and reason:
        raise InputError(f"train.attention=cudnn cannot run: {reason}; use train.attention=auto or xla")
    return Kernel("xla", reason) if reason else Kernel("cudnn", "flash attention: no S x S array")


@lru_cache
def attention_needs(model: ModelConfig, arrays: tuple[tuple[str, tuple[int, ...], str], ...]) -> frozenset[Need]:
    """Return the needs of all attention calls in a forward pass over arrays of these names, shapes and dtypes.

    The model itself is traced to find them, which takes a few hundredths of a second whatever its size.
    """
    batch = {name: jax.ShapeDtypeStruct((1, *shape), dtype) for name, shape, dtype in arrays}
    model = replace(model, vocab_size=model.vocab_size or 1)
    # The training step adds these two arrays to a batch (`training.step.weighted`).
    batch["weights"] = jax.ShapeDtypeStruct(batch["loss_mask"].shape, jnp.float32)
    batch["sample_weights"] = jax.ShapeDtypeStruct((1,), jnp.float32)
    listener = _Listener()

    def losses(key: jax.Array, batch: dict[str, jax.Array]) -> Losses:
        built = build_model(key, model)
        return built.losses(batch, built.context(batch, listener, keys=None))

    jax.eval_shape(losses, jax.random.key(0), batch)
    return frozenset(listener.needs)


class _Listener(Layout):
    """Record the needs of attention calls, and compute nothing."""

    def __init__(self) -> None:
        self.needs: set[Need] = set()

    def attention(
        self,
        q: jax.Array,
        k: jax.Array,
        v: jax.Array,
        pattern: Pattern,
        segment_ids: jax.Array | None,
        drop: Drop | None,
    ) -> jax.Array:
        """Record the needs of this attention call, and return the queries."""
        self.needs |= needs_of(pattern, segment_ids, drop)
        return q

    def experts(
        self, x: jax.Array, weights: Weights, token_weights: jax.Array | None, config: ModelConfig
    ) -> tuple[jax.Array, Losses]:
        """Return x unchanged: tracing the mixture would take long."""
        return x, {}
