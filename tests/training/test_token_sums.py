"""Sums over tokens are taken in fp32, whatever the precision of the step.

A 16-bit sum stands still once its terms are below half its last bit: of 10,000 equal numbers a bf16 sum keeps 256.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from megajax.config import Config, load_config
from megajax.models.families import batch_arrays
from megajax.models.layers import Norm, add_bias
from megajax.models.parameters import named_leaves
from megajax.models.positions import relative_bias
from megajax.planning.deviceless import abstract_step, compile_step, has_compiler
from megajax.planning.equivalence import compile_layout
from tests.models.tiny import GPT, filled

TOKENS = 10_000
HALF = {"bf16": jnp.bfloat16, "fp16": jnp.float16}
MODELS = {
    "gpt": "",
    "bloom": "model.positions=alibi model.embedding_norm=true",
    "qwen3": "model.positions=rope model.norm=rmsnorm model.activation=swiglu model.bias=false model.qkv_bias=true "
    "model.qk_norm=true",
    "mixture": "model.bias=false model.experts=4 model.shared_ffn_size=32 model.shared_gate=true "
    "model.balance_loss=0.1 model.z_loss=0.1",
    "bert": "model.family=bert model.token_types=2 model.pair_task=true",
    "t5": "model.family=t5 model.positions=relative model.bias=false model.norm=rmsnorm",
}
"""Between them, every kind of parameter that a token adds to by itself."""


def config_of(name: str, tokens: int, *words: str) -> Config:
    """One layer, 16 wide, one sample of so many tokens."""
    small = (
        "model.vocab_size=64", "model.num_layers=1", "model.hidden_size=16", "model.num_heads=2", "parallel.data=1",
        "train.steps=1", "train.global_batch_size=1", f"data.seq_length={tokens}", f"model.max_positions={tokens}",
        f"data.decoder_seq_length={tokens}", "model.ffn_hidden_size=32",
    )  # fmt: skip
    return load_config(None, [*small, *MODELS[name].split(), *words]).config


def one_sign(shape: tuple[int, ...], dtype: Any) -> jax.Array:
    return jnp.asarray(np.random.default_rng(0).uniform(0.5, 1.5, shape), dtype)


def in_float64(x: jax.Array, *dims: int) -> np.ndarray:
    return np.asarray(x, np.float64).sum(axis=dims)


@pytest.mark.parametrize("precision", HALF)
def test_the_gradient_of_a_bias_is_a_float64_sum_rounded_once(precision: str) -> None:
    """And forward nothing changes: the bits are those of a sum in the dtype itself."""
    dtype = HALF[precision]
    x, bias = one_sign((2, TOKENS // 2, 3, 4), dtype), one_sign((3, 4), dtype)
    y, pull = jax.vjp(add_bias, x, bias)
    np.testing.assert_array_equal(y, x + bias)
    assert y.dtype == dtype
    dy = one_sign(x.shape, dtype) / 64
    dx, dbias = pull(dy)
    np.testing.assert_array_equal(dx, dy)
    np.testing.assert_allclose(np.float64(dbias), in_float64(dy, 0, 1), rtol=float(jnp.finfo(dtype).eps))


@pytest.mark.parametrize("precision", HALF)
def test_the_gradients_of_a_norm_are_float64_sums_rounded_once(precision: str) -> None:
    """Gain and shift of a LayerNorm, whose rows are of one sign before and after."""
    dtype = HALF[precision]
    norm = filled(lambda _: Norm(4, GPT), np.ones)
    norm = jax.tree.map(lambda a: a.astype(dtype), norm)
    x, dy = jnp.tile(jnp.asarray([0, 0, 0, 3], dtype), (TOKENS, 1)), one_sign((TOKENS, 4), dtype) / 64
    _, pull = jax.vjp(lambda norm: norm(x), norm)
    [gradients] = pull(dy)
    rows = np.asarray(x, np.float64)
    normal = (rows - rows.mean(1, keepdims=True)) / np.sqrt(rows.var(1, keepdims=True) + GPT.norm_eps)
    eps = float(jnp.finfo(dtype).eps)
    np.testing.assert_allclose(np.float64(gradients.bias[...]), in_float64(dy, 0), rtol=eps)
    expected = (np.asarray(dy, np.float64) * normal).sum(0)
    np.testing.assert_allclose(np.float64(gradients.scale[...]), expected, rtol=eps + 1e-4)


def test_the_table_of_distances_sums_up_all_layers_in_fp32() -> None:
    """One bias serves a scan of 300 layers, whose equal gradients a bf16 sum would stop taking in at 256."""
    table, places, layers = jnp.zeros((8, 2), jnp.bfloat16), np.arange(4), 300

    def scores(table: jax.Array) -> jax.Array:
        bias = relative_bias(table, 16, bidirectional=False)
        total, _ = jax.lax.scan(lambda total, _: (total + bias(places, places).sum(), None), 0.0, length=layers)
        return total

    gradient = jax.jit(jax.grad(scores))(table)
    np.testing.assert_allclose(np.float64(gradient[:, 0]), layers * np.array([10, 3, 2, 1, 0, 0, 0, 0]), rtol=2**-8)


def equations(jaxpr: Any) -> Iterator[Any]:
    """All equations of a program, those of inner programs too."""
    for equation in jaxpr.eqns:
        yield equation
        for value in equation.params.values():
            for item in value if isinstance(value, tuple | list) else (value,):
                inner = getattr(item, "jaxpr", item)
                if hasattr(inner, "eqns"):
                    yield from equations(inner)


def half_sums(config: Config) -> list[tuple[str, tuple[int, ...]]]:
    """Operations of the training step that sum up 16-bit numbers, with the shape that goes in.

    Products of matrices are none of them (their sums are fp32 on GPUs), nor is a sum that only removes a 1.
    """
    parallel = config.parallel
    devices = jax.devices()[: parallel.fsdp * parallel.expert * parallel.context * parallel.tensor * parallel.pipe]
    step, _, state, batch = abstract_step(config, devices, "gpu")
    found = []
    for equation in equations(step.trace(state, batch).jaxpr.jaxpr):
        name, (x, *_) = equation.primitive.name, equation.invars or [None]
        sums = name in ("reduce_sum", "cumsum", "scatter-add", "psum", "psum_invariant", "reduce_scatter")
        if sums and x.aval.dtype in HALF.values():
            (out,) = equation.outvars[:1]
            if name != "reduce_sum" or out.aval.size < x.aval.size:
                found.append((name, x.aval.shape))
    return found


@pytest.mark.parametrize(("name", "precision"), [*((name, "bf16") for name in MODELS), ("gpt", "fp16")])
def test_no_step_sums_up_in_16_bits(name: str, precision: str) -> None:
    """Every family, forward and backward, on one device: no sum at all but those of products."""
    assert half_sums(config_of(name, 32, f"train.precision={precision}")) == []


@pytest.mark.parametrize("name", MODELS)
def test_what_layouts_sum_up_in_16_bits_are_activations_and_matrices(name: str) -> None:
    """Slices [B, S, D] of the residual stream over tensor, experts' matrices over fsdp; nothing smaller."""
    layout = "train.global_batch_size=4 parallel.fsdp=2 parallel.tensor=2"
    sums = half_sums(config_of(name, 32, "train.precision=bf16", *layout.split()))
    assert {kind for kind, _ in sums} <= {"reduce_scatter"}
    residual, fc1, fc2 = (1, 32, 16), (4, 16, 1, 16), (4, 16, 16)
    assert {shape for _, shape in sums} <= {residual, *((fc1, fc2) if name == "mixture" else ())}


def first_gradients(config: Config) -> dict[str, np.ndarray]:
    """Of one step on tokens that are all to be followed by the same one, by name."""
    state, step, feed, _ = compile_layout(config)
    rng, shape = np.random.default_rng(0), (config.train.global_batch_size, config.data.seq_length)
    numbers, places = rng.integers(0, 64, shape), np.broadcast_to(np.arange(shape[1]), shape)
    batch = {
        "tokens": numbers, "decoder_tokens": numbers, "labels": np.full(shape, 7), "loss_mask": np.ones(shape),
        "positions": places, "token_types": places % 2, "segment_ids": places // 7, "decoder_segment_ids": places // 7,
        "pair_labels": np.ones(shape[0]), "sample_ids": np.arange(shape[0]),
    }  # fmt: skip
    arrays = batch_arrays(config.model, config.data)
    rows = {name: batch[name].astype(array.dtype) for name, array in arrays.items()}
    state, _ = step(state, feed.place(rows, shape[0]))
    trace = [(name, leaf) for name, leaf in named_leaves(state) if name.startswith("opt_state.trace.")]
    return {name.removeprefix("opt_state.trace."): np.array(leaf[...]) for name, leaf in trace}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "precision", "most"), [("gpt", "bf16", 0.02), ("gpt", "fp16", 0.005), ("t5", "bf16", 0.02)]
)
def test_biases_and_norms_are_as_close_as_matrices(name: str, precision: str, most: float) -> None:
    """10,000 tokens that all push the same way, against fp32. (A 16-bit sum is off by a tenth.)"""
    batch = f"data.seq_length=8 data.decoder_seq_length=8 train.global_batch_size={TOKENS // 8}"
    words = (*batch.split(), f"train.micro_batch_size={TOKENS // 8}", "optim.name=sgd", "optim.clip_grad=0")
    exact = first_gradients(config_of(name, 8, *words))
    half = first_gradients(config_of(name, 8, *words, f"train.precision={precision}", "loss_scale.constant=8192"))
    off = {key: np.linalg.norm(half[key] - g) / np.linalg.norm(g) for key, g in exact.items()}
    print(name, precision, {key: f"{far:.2%}" for key, far in sorted(off.items(), key=lambda item: -item[1])})
    assert max(off.values()) < most, max(off, key=lambda key: off[key])


@pytest.mark.slow
@pytest.mark.skipif(not has_compiler(), reason="needs JAX's CUDA plugin")
def test_the_compiler_of_an_h100_keeps_the_sums_in_fp32() -> None:
    """A GPT with all its biases on one GPU: no reduction of its program, in a fusion or not, has a 16-bit result."""
    config = config_of("gpt", 1024, "model.hidden_size=256", "model.num_heads=4", "train.precision=bf16")
    program = compile_step(config, "H100").step.as_text()
    sums = [line.strip() for line in program.splitlines() if re.search(r" reduce\(", line)]
    assert len(sums) > 10
    assert [line for line in sums if re.search(r"= \(?(bf16|f16)\[", line)] == []
