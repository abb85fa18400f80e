"""The comparison of layouts notices when they differ."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import jax
import numpy as np
import pytest

from megajax.config import Config, OptimConfig, ParallelConfig, TrainConfig
from megajax.models.parameters import logical_axes, named_leaves
from megajax.parallel.run import Runner
from megajax.planning.collectives import Traffic
from megajax.planning.equivalence import (
    Difference,
    Outcome,
    comparable,
    compare,
    every_layout,
    one_device,
    random_batch,
    train_layout,
    unclipped_gradients,
)
from megajax.training.state import init_state, optimizer_for
from tests.harness import BATCH, GPT, LLAMA, tiny_config

DATA = tiny_config(GPT, 4, parallel=ParallelConfig(data=2))


@pytest.fixture(scope="module")
def reference() -> Outcome:
    """The tiny GPT on one device, two steps."""
    return train_layout(one_device(DATA), steps=2)


def test_two_replicas_agree_with_one_device(reference: Outcome) -> None:
    outcome = train_layout(DATA, steps=2)
    far = compare(outcome, reference)
    assert far.initial == 0
    assert 0 < far.gradients < 1e-5
    assert far.departures == ()
    assert {record.axes for record in outcome.traffic} == {("data",)}
    parameters = len(outcome.first_gradients)
    assert parameters - 5 <= outcome.traffic.count("all-reduce") <= parameters + 2  # small ones may travel together


def test_a_gradient_that_is_not_reduced_is_named(reference: Outcome, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every replica keeps the gradient that its own samples give the norms; all other tensors are right."""
    reduce = Runner._reduce_over_data

    def forget_norms(self: Runner, leaf: Any) -> jax.Array:
        return leaf[...] if logical_axes(leaf)[-1] == "norm" else reduce(self, leaf)

    monkeypatch.setattr(Runner, "_reduce_over_data", forget_norms)
    far = compare(train_layout(DATA, steps=2), reference)
    assert far.initial == 0
    assert far.gradients > 0.1
    gradients = [text for text in far.departures if text.startswith("gradient of ")]
    assert gradients[0] == "gradient of blocks.attention.out_bias"  # row-parallel biases go by the same rule
    assert Counter("norm" in text for text in gradients) == {True: 6, False: 2}
    assert far.departures[-1] == "loss of step 2"


def outcome(weight: list[float], gradient: list[float], losses: list[float]) -> Outcome:
    """An outcome of one parameter, made up."""
    gradients = {"opt_state.mu.scale": np.array(gradient)}
    return Outcome({"params.scale": np.array(weight)}, Traffic(()), losses, first_gradients=gradients)


ONE = outcome([1.0, 2.0], [4.0, 0.0], [8.0, 8.0])


@pytest.mark.parametrize(
    ("other", "difference"),
    [
        (ONE, Difference(0, 0, 0, ())),
        (outcome([1, 2], [4, 2e-5], [8, 8.00002]), Difference(0, 5e-6, 2.5e-6, ())),
        (outcome([1, 2.5], [4, 0], [8, 8]), Difference(0.25, 0, 0, ("initial scale",))),
        (
            outcome([1, 2], [4, 4e-4], [8, 8.008]),
            Difference(0, 1e-4, 1e-3, ("gradient of scale", "loss of step 2")),
        ),
    ],
)
def test_differences_by_hand(other: Outcome, difference: Difference) -> None:
    far = compare(other, ONE)
    assert far.departures == difference.departures
    numbers = (difference.initial, difference.gradients, difference.losses)
    assert (far.initial, far.gradients, far.losses) == pytest.approx(numbers, rel=1e-6)


def test_nan_departs() -> None:
    far = compare(outcome([1, 2], [np.nan, 0], [8, np.nan]), ONE)
    assert far.departures == ("gradient of scale", "loss of step 2")


@pytest.mark.parametrize("name", ["adamw", "sgd", "lion", "muon"])
def test_every_optimizer_shows_the_gradient_of_every_parameter(name: str) -> None:
    config = tiny_config(LLAMA, optim=OptimConfig(name=name))
    state = jax.eval_shape(lambda: init_state(jax.random.key(0), config, optimizer_for(config.optim, config.model)))
    zeros = {name: np.zeros(leaf.shape) for name, leaf in named_leaves(state)}
    shown = unclipped_gradients(zeros, norm=2.0, clip_grad=1.0)
    assert Counter(value.shape for value in shown.values()) == Counter(p.shape for _, p in named_leaves(state.params))


def test_clipping_is_undone() -> None:
    state = {"opt_state.trace.scale": np.array([0.3, 0.4])}  # of norm 2, clipped to 0.5
    assert unclipped_gradients(state, norm=2.0, clip_grad=0.5)["opt_state.trace.scale"] == pytest.approx([1.2, 1.6])
    for norm, clip_grad in ((2.0, 0.0), (2.0, 3.0)):
        assert unclipped_gradients(state, norm, clip_grad)["opt_state.trace.scale"] == pytest.approx([0.3, 0.4])


def test_rematerialisation_policies_take_turns() -> None:
    config = tiny_config(GPT, train=TrainConfig(steps=5, global_batch_size=BATCH, remat=("qkv",)))
    turns = [layout.train.remat for layout in every_layout(config, 2)]
    assert turns == [("qkv",), "none", "selective", "full", "none", "selective", "full"]


def test_what_has_to_change_is_said() -> None:
    train = TrainConfig(precision="bf16", attention="cudnn", micro_batch_size=2)
    config, changes = comparable(Config(model=replace(GPT, vocab_size=None), train=train), devices=6)
    assert (config.train.precision, config.train.attention, config.train.micro_batch_size) == ("fp32", "auto", 2)
    assert config.model.padded_vocab_size == 384  # 256 ids in a multiple of 128 and of 6
    assert [change.split()[0] for change in changes] == ["train.precision", "train.attention", "model.vocab_size"]
    assert comparable(config, devices=6) == (config, [])


def test_samples_are_of_unequal_lengths_and_hold_documents() -> None:
    batch = random_batch(tiny_config(), step=3)
    np.testing.assert_array_equal(batch["sample_ids"], 3 * BATCH + np.arange(BATCH))
    lengths = batch["loss_mask"].sum(axis=1)
    assert len(set(lengths)) > 2
    assert 7 <= lengths.min() < lengths.max() <= 16
    assert (batch["tokens"][batch["loss_mask"] > 0] == 0).any()
