"""Models so small that a test can look at every number, and functions that run them."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from megajax.config.model import ModelConfig
from megajax.models.gpt import Gpt
from megajax.models.layout import Layout

M = TypeVar("M")

GPT = ModelConfig(num_layers=2, hidden_size=16, num_heads=4, max_positions=16, vocab_size=50)
LLAMA = ModelConfig(
    num_layers=2, hidden_size=16, num_heads=4, num_kv_heads=2, ffn_hidden_size=24, max_positions=16, vocab_size=50,
    positions="rope", norm="rmsnorm", activation="swiglu", bias=False, tied_head=False,
)  # fmt: skip
GEMMA = ModelConfig(
    num_layers=4, hidden_size=16, num_heads=4, num_kv_heads=2, head_dim=8, ffn_hidden_size=24, max_positions=16,
    vocab_size=50, positions="rope", norm="rmsnorm", activation="geglu", bias=False, layer_pattern=("local", "global"),
    window=3, rope_local_base=100.0, attention_scale=0.4, attention_softcap=2.0, logit_softcap=3.0, norm_plus_one=True,
    branch_norm=True, embedding_scale=True,
)  # fmt: skip
"""The switches of Gemma 2 and 3 together, but for qk_norm."""
STYLES = {"gpt": GPT, "llama": LLAMA}


def filled(make: Callable[[jax.Array], M], value: Callable[[tuple[int, ...]], np.ndarray]) -> M:
    """The module that `make` builds of a key, with value(shape) as its weights: no drawing is compiled."""
    abstract = jax.eval_shape(make, jax.random.key(0))
    return jax.tree.map(lambda x: jnp.asarray(value(x.shape), x.dtype), abstract)


def random_model(config: ModelConfig, seed: int = 0) -> Gpt:
    """All weights random, also biases, gains and padding rows: no mistake hides behind a zero or a one."""
    rng = np.random.default_rng(seed)
    return filled(lambda key: Gpt(key, config), lambda shape: rng.normal(scale=0.5, size=shape))


def random_tokens(batch: int, sequence: int, seed: int = 0, vocab: int = 50) -> np.ndarray:
    """Ids [B, S]."""
    return np.random.default_rng(seed).integers(0, vocab, (batch, sequence)).astype(np.int32)


def batch_of(tokens: np.ndarray, **others: np.ndarray) -> dict[str, np.ndarray]:
    """Tokens [B, S] at positions 0, 1, ... with other arrays of `megajax.data.gpt` beside or instead."""
    positions = np.broadcast_to(np.arange(tokens.shape[1], dtype=np.int32), tokens.shape)
    return {"tokens": tokens, "positions": positions, **others}


@jax.jit
def forward(model: Gpt, batch: dict[str, jax.Array], keys: jax.Array | None = None) -> jax.Array:
    """Logits [B, S, V] of the ids that count."""
    return model.logits(model.hidden(batch, model.context(batch, Layout(), keys)))
