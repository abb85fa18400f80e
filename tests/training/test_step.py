"""The training step on small, checkable inputs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from megajax.config import LossScaleConfig, OptimConfig, ParallelConfig, TrainConfig
from megajax.data.dataset import Batch
from megajax.data.gpt import make_batch
from megajax.observe.report import StepMetrics
from megajax.training.health import check_step
from tests.harness import BATCH, GPT, compile_layout, gathered, random_samples, tiny_config, train_layout, worst

ONE = ParallelConfig(data=1)


def masked_batch(config: Any, kept: list[int]) -> Batch:
    """Eight samples of which number i keeps the loss of its first kept[i] tokens."""
    batch = make_batch(random_samples(0), np.arange(BATCH), config.data, eod=0)
    for row, count in zip(batch["loss_mask"], kept, strict=True):
        row[count:] = 0
    return batch


@pytest.fixture(scope="module")
def one_batch() -> Any:
    """Step with all eight samples in one microbatch."""
    return compile_layout(tiny_config(GPT, 8), ONE)


@pytest.fixture(scope="module")
def four_microbatches() -> Any:
    """Step with two samples in each of four microbatches."""
    return compile_layout(tiny_config(GPT, 2), ONE)


def run(compiled: Any, batch: Batch) -> tuple[dict[str, np.ndarray], dict[str, float]]:
    """One step from the initial state, which is kept."""
    state, step, feed, _ = compiled
    state, metrics = step(jax.tree.map(jnp.copy, state), feed.place(batch, BATCH))
    return gathered(state), {name: float(value) for name, value in metrics.items()}


def test_loss_is_the_mean_over_unmasked_tokens(one_batch: Any, four_microbatches: Any) -> None:
    """Microbatches with 2 and with 26 trainable tokens weigh by token, not by microbatch."""
    batch = masked_batch(tiny_config(), [1, 1, 13, 13, 0, 16, 5, 7])
    whole, accumulated = run(one_batch, batch), run(four_microbatches, batch)
    assert whole[1]["tokens"] == accumulated[1]["tokens"] == 56
    assert accumulated[1]["lm loss"] == pytest.approx(whole[1]["lm loss"], rel=1e-6)
    moments = {name: value for name, value in whole[0].items() if "opt_state.mu" in name}
    assert worst({name: accumulated[0][name] for name in moments}, moments)[0] < 1e-5


def test_a_microbatch_without_tokens_counts_nothing(one_batch: Any, four_microbatches: Any) -> None:
    """The other three microbatches alone."""
    batch = masked_batch(tiny_config(), [16, 16, 0, 0, 16, 16, 16, 16])
    loss = run(four_microbatches, batch)[1]["lm loss"]
    assert np.isfinite(loss)
    assert loss == pytest.approx(run(one_batch, batch)[1]["lm loss"], rel=1e-6)


def test_a_step_without_tokens_is_skipped_with_a_warning(one_batch: Any, caplog: pytest.LogCaptureFixture) -> None:
    before = gathered(one_batch[0])
    after, metrics = run(one_batch, masked_batch(tiny_config(), [0] * BATCH))
    assert metrics["skipped"] == 1
    for name, value in before.items():
        if name != "step" and not name.startswith("loss_scale"):
            np.testing.assert_array_equal(after[name], value, err_msg=name)
    check_step(StepMetrics(1, BATCH, BATCH, metrics), tiny_config(), lambda: None)
    assert "step 1 has no unmasked token" in caplog.text


@pytest.mark.slow
def test_padding_of_the_vocabulary_changes_nothing() -> None:
    """Rows added for alignment take no part in the softmax and receive no gradient."""
    sgd = OptimConfig(name="sgd", lr=1e-2, decay_style="constant")
    configs = [tiny_config(replace(GPT, vocab_multiple=n), 8, optim=sgd) for n in (100, 128)]
    outcomes = [train_layout(config, ONE, steps=2) for config in configs]
    np.testing.assert_allclose(outcomes[0].losses, outcomes[1].losses, rtol=1e-6)
    padded = outcomes[1].final["params.word_embedding"]
    assert padded.shape[0] == 128
    np.testing.assert_array_equal(padded[100:], 0)
    np.testing.assert_allclose(padded[:100], outcomes[0].final["params.word_embedding"], atol=1e-7)


def fp16_config(**scale: Any) -> Any:
    """fp16 with the given loss-scale constants."""
    train = TrainConfig(steps=5, global_batch_size=BATCH, micro_batch_size=8, precision="fp16")
    return replace(tiny_config(GPT, 8, train=train), loss_scale=LossScaleConfig(**scale))


def test_fp16_overflow_skips_the_step_and_halves_the_scale() -> None:
    """From 2^40 every gradient overflows; scales, and everything else untouched."""
    config = fp16_config(initial=2.0**40, hysteresis=2, max_skips_at_minimum=3)
    state, step, feed, _ = compile_layout(config, ONE)
    before = gathered(state)
    scales = []
    for number in range(4):
        batch = make_batch(random_samples(number), np.arange(BATCH), config.data, eod=0)
        state, metrics = step(state, feed.place(batch, BATCH))
        scales.append(float(metrics["loss-scale"]))
        assert metrics["skipped"] == 1
    assert scales == [2.0**40, 2.0**40, 2.0**39, 2.0**38]  # the first overflow only uses up the hysteresis
    after = gathered(state)
    for name in before:
        if name.startswith(("params", "opt_state", "samples")):
            np.testing.assert_array_equal(after[name], before[name], err_msg=name)


def test_fp16_stops_after_skips_at_the_smallest_scale() -> None:
    """No silent endless skipping."""
    config = fp16_config(initial=1.0, max_skips_at_minimum=2)
    metrics = {"skipped": 1.0, "tokens": 8.0, "skips-at-minimum": 2.0, "bad-steps": 0.0}
    metrics |= {"lm loss": 1.0, "grad-norm": np.inf}
    with pytest.raises(FloatingPointError, match="2 steps in a row at the smallest loss scale"):
        check_step(StepMetrics(9, 72, 8, metrics), config, lambda: 5)


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_half_precision_keeps_fp32_master_weights(precision: str) -> None:
    """An update far below the resolution of the compute dtype is not lost, and the loss stays close to fp32."""
    train = TrainConfig(steps=5, global_batch_size=BATCH, micro_batch_size=8, precision=precision)
    optim = OptimConfig(lr=1e-6, decay_style="constant")
    config = replace(tiny_config(GPT, 8, train=train, optim=optim), loss_scale=LossScaleConfig(initial=2.0**10))
    half = train_layout(config, ONE, steps=3)
    full = train_layout(tiny_config(GPT, 8, optim=optim), ONE, steps=3)
    np.testing.assert_allclose(half.losses, full.losses, rtol=5e-3)
    name = "params.final_norm.scale"
    assert half.final[name].dtype == np.float32
    moved = np.abs(half.final[name] - 1)
    assert 0 < moved.max() < 1e-5  # bf16 around 1 is 0.0078 apart


@pytest.mark.slow
def test_gradients_accumulate_in_fp32() -> None:
    """Sums of bf16 gradients do not lose small terms, as bf16 sums would."""
    train = TrainConfig(steps=5, global_batch_size=BATCH, micro_batch_size=1, precision="bf16")
    eight = train_layout(tiny_config(GPT, train=train), ONE, steps=1).first_gradients
    whole = train_layout(tiny_config(GPT, train=replace(train, micro_batch_size=8)), ONE, steps=1).first_gradients
    name = "opt_state.mu.blocks.mlp.fc2"
    assert eight[name].dtype == np.float32
    as_bf16 = np.asarray(jnp.asarray(eight[name], jnp.bfloat16), np.float32)
    assert (as_bf16 != eight[name]).mean() > 0.9  # more bits than a bf16 accumulator holds
    assert worst({name: eight[name]}, {name: whole[name]})[0] < 0.02


@pytest.mark.slow
def test_norm_gradients_under_sequence_parallelism_are_whole() -> None:
    """Tensor 2 with sequence parallelism, every norm, against one device."""
    one = train_layout(tiny_config(GPT, 8), ONE, steps=1)
    two = train_layout(tiny_config(GPT, 8), ParallelConfig(data=1, tensor=2), steps=1)
    norms = {name: value for name, value in one.first_gradients.items() if "norm" in name}
    assert len(norms) == 6
    assert worst({name: two.first_gradients[name] for name in norms}, norms)[0] < 1e-5


def test_a_gradient_that_is_not_finite_stops_the_run_by_name() -> None:
    """fp32 and bf16: the message has step, learning rate and the last checkpoint."""
    metrics = {"skipped": 1.0, "tokens": 8.0, "bad-steps": 1.0, "lm loss": float("nan")}
    metrics |= {"grad-norm": np.nan, "learning-rate": 3e-4}
    with pytest.raises(FloatingPointError, match=r"loss is nan at step 12, learning rate 0.0003; .*: step 10 in "):
        check_step(StepMetrics(12, 96, 8, metrics), tiny_config(), lambda: 10)


@pytest.mark.slow
@pytest.mark.parametrize("remat", ["none", "full", ("qkv", "mlp_hidden")])
def test_rematerialisation_changes_no_number(remat: Any) -> None:
    """The default (selective) against the other policies."""
    train = TrainConfig(steps=5, global_batch_size=BATCH, micro_batch_size=8, remat=remat)
    outcome = train_layout(tiny_config(GPT, 8, train=train), ONE, steps=2)
    np.testing.assert_allclose(outcome.losses, train_layout(tiny_config(GPT, 8), ONE, steps=2).losses, rtol=1e-6)
