"""`python -m bench.framework_overhead`: MegaJAX's training step compared with bare JAX for one device.

The bare step is written by hand for speed: a dict of arrays, one scan over the layers, tokens flattened to two
dimensions around every matrix product, optax.adamw with clipping, everything donated. Both start from the same weights,
see the same batches and must report the same losses; then they take turns, so that changes in the machine's load affect
both. A GPT of 6 layers, hidden 384, sequence 256, batch 8, vocabulary 50,304 in fp32.

Shapes: B batch, S sequence, D embed, N heads, H head dim, V vocabulary, L layers, T = B S tokens.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from megajax.config import Config, DataConfig, ModelConfig, OptimConfig, ParallelConfig, TrainConfig
from megajax.data.gpt import make_batch
from megajax.models.gpt import Gpt
from tests.harness import compile_layout, random_samples

GPT = ModelConfig(num_layers=6, hidden_size=384, num_heads=6, max_positions=256, vocab_size=50304)
OPTIM = OptimConfig(lr=3e-4, decay_style="constant", weight_decay=0.1, clip_grad=1.0)
Weights = dict[str, Any]
Step = Callable[[], float]


def main(argv: Sequence[str] | None = None) -> int:
    """Print a table; 1 if the losses differ."""
    parser = argparse.ArgumentParser(prog="python -m bench.framework_overhead")
    parser.add_argument("--rounds", type=int, default=10, help="timed steps of each")
    ours, bare = steps_of(GPT, batch=8)
    return report(*compare(ours, bare, parser.parse_args(argv).rounds))


def steps_of(model: ModelConfig, batch: int) -> tuple[Step, Step]:
    """MegaJAX's step and the bare one, each a call that takes a step on its own state and returns its loss."""
    sequence = model.max_positions
    config = Config(
        model=model,
        data=DataConfig(seq_length=sequence),
        train=TrainConfig(steps=1, global_batch_size=batch, micro_batch_size=batch, remat="none"),
        optim=OPTIM,
    )
    state, train_step, feed, _ = compile_layout(config, ParallelConfig(data=1))
    weights = bare_weights(state.params)
    samples = random_samples(0, batch, sequence, model.vocab_size)
    host_batch = make_batch(samples, np.arange(batch), config.data, eod=0)
    placed = feed.place(host_batch, batch)

    def ours() -> float:
        nonlocal state
        state, metrics = train_step(state, placed)
        jax.block_until_ready(state)
        return float(metrics["lm loss"])

    optimizer = bare_optimizer(weights)
    opt_state = optimizer.init(weights)
    bare_step = jax.jit(build_bare_step(model, optimizer), donate_argnums=(0, 1))
    tokens, labels = jnp.asarray(host_batch["tokens"]), jnp.asarray(host_batch["labels"])

    def bare() -> float:
        nonlocal weights, opt_state
        weights, opt_state, loss = bare_step(weights, opt_state, tokens, labels)
        jax.block_until_ready(weights)
        return float(loss)

    return ours, bare


def bare_weights(model: Gpt) -> Weights:
    """The same weights, laid out for plain matrix products; copies, since both steps donate."""
    blocks, attention, mlp = model.blocks, model.blocks.attention, model.blocks.mlp
    layers, width = attention.qkv.shape[:2]
    weights = {
        "embedding": model.word_embedding[...],
        "positions": model.position_embedding[...],
        "blocks": {
            "norm1": blocks.attention_norm.scale[...],
            "norm1_bias": blocks.attention_norm.bias[...],
            # [L, D, N, 3, H] -> [L, D, 3 N H]: all queries, all keys, all values
            "qkv": attention.qkv[...].transpose(0, 1, 3, 2, 4).reshape(layers, width, -1),
            "qkv_bias": attention.qkv_bias[...].transpose(0, 2, 1, 3).reshape(layers, -1),
            "out": attention.out[...].reshape(layers, -1, width),
            "out_bias": attention.out_bias[...],
            "norm2": blocks.mlp_norm.scale[...],
            "norm2_bias": blocks.mlp_norm.bias[...],
            "fc1": mlp.fc1[...].reshape(layers, width, -1),
            "fc1_bias": mlp.fc1_bias[...].reshape(layers, -1),
            "fc2": mlp.fc2[...],
            "fc2_bias": mlp.fc2_bias[...],
        },
        "norm": model.final_norm.scale[...],
        "norm_bias": model.final_norm.bias[...],
    }
    device = jax.devices()[0]
    return jax.tree.map(lambda x: jax.device_put(np.array(x), device), weights)


def bare_optimizer(weights: Weights) -> optax.GradientTransformation:
    """AdamW of `OPTIM`."""
    decayed = {"embedding", "positions", "qkv", "out", "fc1", "fc2"}
    mask = jax.tree_util.tree_map_with_path(lambda path, _: path[-1].key in decayed, weights)
    adamw = optax.adamw(OPTIM.lr, OPTIM.beta1, OPTIM.beta2, OPTIM.eps, weight_decay=OPTIM.weight_decay, mask=mask)
    return optax.chain(optax.clip_by_global_norm(OPTIM.clip_grad), adamw)


def build_bare_step(model: ModelConfig, optimizer: optax.GradientTransformation) -> Callable[..., Any]:
    """f(weights, opt_state, tokens [B, S], labels [B, S]) -> (weights, opt_state, loss)."""
    N, H, D = model.num_heads, model.head_size, model.hidden_size

    def norm(x: jax.Array, scale: jax.Array, bias: jax.Array) -> jax.Array:
        x = x - x.mean(-1, keepdims=True)
        return x * jax.lax.rsqrt(jnp.square(x).mean(-1, keepdims=True) + model.norm_eps) * scale + bias

    def loss_of(weights: Weights, tokens: jax.Array, labels: jax.Array) -> jax.Array:
        B, S = tokens.shape
        causal = jnp.tril(jnp.ones((S, S), bool))

        def block(x: jax.Array, w: Weights) -> tuple[jax.Array, None]:
            qkv = norm(x, w["norm1"], w["norm1_bias"]) @ w["qkv"] + w["qkv_bias"]
            q, k, v = qkv.reshape(B, S, 3, N, H).transpose(2, 0, 3, 1, 4)
            scores = jnp.where(causal, q @ k.swapaxes(-1, -2) * H**-0.5, -jnp.inf)
            heads = jax.nn.softmax(scores) @ v
            x = x + heads.swapaxes(1, 2).reshape(B * S, D) @ w["out"] + w["out_bias"]
            hidden = jax.nn.gelu(norm(x, w["norm2"], w["norm2_bias"]) @ w["fc1"] + w["fc1_bias"])
            return x + hidden @ w["fc2"] + w["fc2_bias"], None

        x = (weights["embedding"][tokens] + weights["positions"][:S]).reshape(B * S, D)
        x, _ = jax.lax.scan(block, x, weights["blocks"])
        logits = norm(x, weights["norm"], weights["norm_bias"]) @ weights["embedding"].T
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels.reshape(-1)).mean()

    def step(weights: Weights, opt_state: Any, tokens: jax.Array, labels: jax.Array) -> tuple[Weights, Any, jax.Array]:
        loss, gradients = jax.value_and_grad(loss_of)(weights, tokens, labels)
        updates, opt_state = optimizer.update(gradients, opt_state, weights)
        return optax.apply_updates(weights, updates), opt_state, loss

    return step


def compare(ours: Step, bare: Step, rounds: int) -> tuple[np.ndarray, np.ndarray]:
    """Seconds [rounds, 2] and losses [rounds + 2, 2] of ours and bare, in turns; the first two steps are not timed."""
    seconds, losses = [], []
    for number in range(rounds + 2):
        lap, pair = [time.perf_counter()], []
        for step in (ours, bare):
            pair.append(step())
            lap.append(time.perf_counter())
        losses.append(pair)
        if number >= 2:
            seconds.append(np.diff(lap))
    return np.array(seconds), np.array(losses)


def report(seconds: np.ndarray, losses: np.ndarray) -> int:
    """Print medians and their ratio; 1 if the losses differ."""
    print(f"{'':<8}{'median ms':>10}{'least ms':>10}{'first loss':>12}{'last loss':>11}")
    for name, laps, loss in zip(("megajax", "bare"), seconds.T * 1e3, losses.T, strict=True):
        print(f"{name:<8}{statistics.median(laps):>10.1f}{laps.min():>10.1f}{loss[0]:>12.5f}{loss[-1]:>11.5f}")
    medians, least = np.median(seconds, axis=0), seconds.min(axis=0)
    print(f"{'ratio':<8}{medians[0] / medians[1]:>10.3f}{least[0] / least[1]:>10.3f}")
    worst = np.abs(losses[:, 0] - losses[:, 1]).max()
    print(f"losses of {len(losses)} steps from the same weights differ by at most {worst:.1e}")
    return int(not worst < 1e-3)


if __name__ == "__main__":
    sys.exit(main())
