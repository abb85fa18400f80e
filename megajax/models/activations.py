"""Activation functions of an MLP, gated ones included, and the soft cap of scores and logits.

Shapes: A = 1, or 2 (gate and up) input matrices, F mlp.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp

from megajax.config.model import Activation

ACTIVATIONS: dict[Activation, Callable[[jax.Array], jax.Array]] = {
    "gelu": partial(jax.nn.gelu, approximate=True),
    "gelu_exact": partial(jax.nn.gelu, approximate=False),
    "relu": jax.nn.relu,
    "squared_relu": lambda x: jnp.square(jax.nn.relu(x)),
    "swiglu": jax.nn.silu,
    "geglu": partial(jax.nn.gelu, approximate=True),
}
"""Values of `model.activation` -> the activation function, for a gated unit that of its gate."""


def activate(hidden: jax.Array, activation: Activation) -> jax.Array:
    """Apply the activation to hidden [..., A, F] -> [..., F]; if A is 2, multiply by the second part."""
    first = ACTIVATIONS[activation](hidden[..., 0, :])
    return first * hidden[..., 1, :] if hidden.shape[-2] == 2 else first


def capped(logits: jax.Array, softcap: float | None) -> jax.Array:
    """Return c tanh(logits / c) for a cap c (Gemma 2: 2408.00118 §2), or unchanged logits without a cap."""
    return logits if softcap is None else softcap * jnp.tanh(logits / softcap)
