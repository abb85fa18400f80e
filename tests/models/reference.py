"""Reference of the model for the tests, in float64 NumPy and plain loops over layers, heads and tokens.

Shapes: B batch, S sequence, D embed, N heads, K kv heads, H head dim, F mlp, V vocabulary without padding.
"""

from __future__ import annotations

from dataclasses import replace
from statistics import NormalDist

import numpy as np

from megajax.config.model import ModelConfig
from megajax.models.gpt import Gpt
from megajax.models.parameters import named_leaves

Array = np.ndarray
Weights = dict[str, Array]


def logits(model: Gpt, tokens: Array, positions: Array | None = None, segments: Array | None = None) -> Array:
    """Tokens [B, S] -> logits [B, S, V]; positions count from 0 and all tokens are one document unless told."""
    weights = {name: np.asarray(param[...], np.float64) for name, param in named_leaves(model)}
    positions = np.broadcast_to(np.arange(tokens.shape[1]), tokens.shape) if positions is None else positions
    segments = np.zeros_like(tokens) if segments is None else segments
    return np.stack([_row(weights, model.config, *row) for row in zip(tokens, positions, segments, strict=True)])


def _row(w: Weights, c: ModelConfig, tokens: Array, positions: Array, segments: Array) -> Array:
    x = w["word_embedding"][tokens]
    if c.positions == "learned":
        x = x + w["position_embedding"][positions]
    if c.embedding_scale:
        x = x * np.sqrt(c.hidden_size)
    if c.embedding_norm:
        x = norm(x, w, "embedding_norm", c)
    for number in range(c.num_layers):
        stack, first = ("dense_blocks.", 0) if number < c.dense_layers else ("blocks.", c.dense_layers)
        layer = {name.removeprefix(stack): value[number - first] for name, value in w.items() if name.startswith(stack)}
        attended = attention_layer(norm(x, layer, "attention_norm", c), layer, of_layer(c, number), positions, segments)
        x = x + (norm(attended, layer, "attention_branch_norm", c) if c.branch_norm else attended)
        fed = mlp(norm(x, layer, "mlp_norm", c), layer, c.activation)
        x = x + (norm(fed, layer, "mlp_branch_norm", c) if c.branch_norm else fed)
    head = w["word_embedding"] if c.tied_head else w["head"]
    return capped(norm(x, w, "final_norm", c) @ head[: c.vocab_size].T, c.logit_softcap)


def of_layer(c: ModelConfig, number: int) -> ModelConfig:
    """Window and rotary embedding of one layer, as if all layers had them."""
    if not c.layer_pattern:
        return c
    alone = replace(c, layer_pattern=(), rope_local_base=None)
    if c.layer_pattern[number % len(c.layer_pattern)] == "global":
        return replace(alone, window=None)
    return replace(alone, rope_base=c.rope_local_base or c.rope_base)


def capped(x: Array, cap: float | None) -> Array:
    """Between -cap and cap."""
    return cap * np.tanh(x / cap) if cap else x


def norm(x: Array, w: Weights, name: str, c: ModelConfig) -> Array:
    """LayerNorm or RMSNorm of the last dimension."""
    if c.norm == "layernorm":
        x = x - x.mean(axis=-1, keepdims=True)
    x = x / np.sqrt((x**2).mean(axis=-1, keepdims=True) + c.norm_eps) * (w[f"{name}.scale"] + c.norm_plus_one)
    return x + w.get(f"{name}.bias", 0)


def mlp(x: Array, w: Weights, activation: str) -> Array:
    """[S, D] -> [S, D]; where there are two input matrices, the first goes through the activation."""
    hidden = np.einsum("sd,dpf->psf", x, w["mlp.fc1"]) + w.get("mlp.fc1_bias", np.zeros(1))[:, None]
    functions = {"gelu": gelu, "geglu": gelu, "swiglu": silu, "gelu_exact": gelu_exact, "relu": relu}
    functions["squared_relu"] = lambda x: relu(x) ** 2
    first = functions[activation](hidden[0])
    return (first * hidden[1] if len(hidden) == 2 else first) @ w["mlp.fc2"] + w.get("mlp.fc2_bias", 0)


def relu(x: Array) -> Array:
    """The positive part."""
    return np.maximum(x, 0)


def gelu_exact(x: Array) -> Array:
    """x times the probability of a standard normal below x."""
    return x * np.vectorize(NormalDist().cdf)(x)


def gelu(x: Array) -> Array:
    """The tanh form of 1606.08415."""
    return 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))


def silu(x: Array) -> Array:
    """x times its sigmoid."""
    return x / (1 + np.exp(-x))


def attention_layer(x: Array, w: Weights, c: ModelConfig, positions: Array, segments: Array) -> Array:
    """[S, D] -> [S, D]; the fused projection holds for each kv head its queries, then the key, then the value."""
    qkv = np.einsum("sd,dkgh->skgh", x, w["attention.qkv"]) + w.get("attention.qkv_bias", 0)
    group = c.num_heads // c.kv_heads
    q = np.stack([qkv[:, n // group, n % group] for n in range(c.num_heads)], axis=1)
    k, v = qkv[:, :, group], qkv[:, :, group + 1]
    if c.qk_norm:
        q, k = norm(q, w, "attention.q_norm", c), norm(k, w, "attention.k_norm", c)
    if c.positions == "rope":
        rotated = int(c.head_size * c.rope_fraction)
        q, k = rotate(q, positions, c, rotated), rotate(k, positions, c, rotated)
    heads = attend(q, k, v, segments, c)
    return np.einsum("snh,nhd->sd", heads, w["attention.out"]) + w.get("attention.out_bias", 0)


def attend(q: Array, k: Array, v: Array, segments: Array, c: ModelConfig) -> Array:
    """Queries [S, N, H], keys and values [S, K, H], document numbers [S] -> [S, N, H]."""
    out = np.zeros_like(q)
    for s, n in np.ndindex(*q.shape[:2]):
        head = n // (q.shape[1] // k.shape[1])
        first = max(0, s + 1 - c.window) if c.window else 0
        seen = [t for t in range(first, s + 1) if segments[t] == segments[s]]
        scores = np.array([q[s, n] @ k[t, head] for t in seen]) * (c.attention_scale or 1 / np.sqrt(q.shape[2]))
        scores = capped(scores, c.attention_softcap)
        if c.positions == "alibi":
            scores -= SLOPES[q.shape[1]][n] * (s - np.array(seen))
        probabilities = np.exp(scores - scores.max())
        out[s, n] = probabilities @ v[seen, head] / probabilities.sum()
    return out


SLOPES = {4: [1 / 4, 1 / 16, 1 / 64, 1 / 256], 6: [1 / 4, 1 / 16, 1 / 64, 1 / 256, 1 / 2, 1 / 8]}
"""Of ALiBi (2108.12409 §3), by the number of heads."""


def rotate(x: Array, positions: Array, c: ModelConfig, rotated: int) -> Array:
    """Turn the pair (i, i + rotated / 2) of every head of x [S, heads, H] by position / base^(2 i / rotated)."""
    out = x.copy()
    for i in range(rotated // 2):
        j = i + rotated // 2
        frequency = 1 / c.rope_base ** (2 * i / rotated)
        if c.rope_scaling_factor:
            frequency = scaled(frequency, c)
        angle = (positions * frequency)[:, None]
        out[..., i] = x[..., i] * np.cos(angle) - x[..., j] * np.sin(angle)
        out[..., j] = x[..., j] * np.cos(angle) + x[..., i] * np.sin(angle)
    return out


def scaled(frequency: float, c: ModelConfig) -> float:
    """LLaMA 3.1's frequencies, case by case of the wavelength."""
    wavelength = 2 * np.pi / frequency
    if wavelength < c.rope_original_positions / c.rope_high_frequency:
        return frequency
    if wavelength > c.rope_original_positions / c.rope_low_frequency:
        return frequency / c.rope_scaling_factor
    between = c.rope_original_positions / wavelength - c.rope_low_frequency
    share = between / (c.rope_high_frequency - c.rope_low_frequency)
    return (1 - share) * frequency / c.rope_scaling_factor + share * frequency
