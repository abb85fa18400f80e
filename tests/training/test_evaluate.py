"""Losses on held-out samples are means over all tokens that count, whatever their batch."""

from __future__ import annotations

from dataclasses import replace

import jax
import numpy as np
import pytest

from megajax.config import Config, ParallelConfig, load_config
from megajax.data.dataset import Batch
from megajax.models.layout import Layout
from megajax.models.model import Model
from megajax.planning.equivalence import comparable, compile_layout, random_batch
from megajax.training.evaluate import Evaluator, build_eval_step

SAMPLES = 12


class Fixed:
    """Samples in memory, a batch and a half of them; numbers past the end give rows without anything to learn.

    With `empty`, no sample has anything to learn.
    """

    def __init__(self, config: Config, empty: bool = False) -> None:
        batches = [random_batch(config, step) for step in range(2)]
        self.arrays = {name: np.concatenate([batch[name] for batch in batches])[:SAMPLES] for name in batches[0]}
        self.empty = empty

    def __len__(self) -> int:
        return SAMPLES

    def batch(self, sample_ids: np.ndarray) -> Batch:
        batch = {name: array[sample_ids % SAMPLES].copy() for name, array in self.arrays.items()}
        nothing = (sample_ids >= SAMPLES) | self.empty
        batch["loss_mask"][nothing] = 0
        batch["pair_labels"][nothing] = -1
        return batch


@pytest.fixture(scope="module")
def config() -> Config:
    """A tiny BERT that also learns the order of pairs, 8 samples a batch."""
    config, _ = comparable(load_config("verify/bert_tiny.yaml").config, devices=1)
    model = replace(config.model, num_layers=1, pair_task=True, hidden_dropout=0.0, attention_dropout=0.0)
    train = replace(config.train, global_batch_size=8, micro_batch_size=4)
    return replace(config, model=model, train=train, parallel=ParallelConfig(data=1))


@pytest.fixture(scope="module")
def evaluator(config: Config) -> tuple[Evaluator, Model]:
    """On one device, and the weights before training."""
    state, _, feed, rules = compile_layout(config)
    return Evaluator(build_eval_step(config, rules, "xla"), feed, 8, config.evaluation.steps), state.params


def test_both_losses_of_bert_are_means_over_all_that_counts(config: Config, evaluator: tuple[Evaluator, Model]) -> None:
    """Samples one by one, summed up by hand: tokens for the one loss, labelled pairs for the other."""
    evaluate, params = evaluator
    dataset = Fixed(config)
    each = jax.jit(lambda model, batch: model.losses(batch, model.context(batch, Layout(), None)))
    sums = {"lm loss": 0.0, "sop loss": 0.0}
    for i in range(SAMPLES):
        batch = dataset.batch(np.array([i]))
        weights = {"weights": batch["loss_mask"], "sample_weights": np.float32(batch["pair_labels"] >= 0)}
        for name, loss in each(params, batch | weights).items():
            sums[name] += float(loss)
    counts = {"lm loss": dataset.arrays["loss_mask"].sum(), "sop loss": (dataset.arrays["pair_labels"] >= 0).sum()}
    assert counts["sop loss"] == SAMPLES - 1
    assert evaluate(params, dataset) == {name: pytest.approx(sums[name] / counts[name], rel=1e-5) for name in sums}


def test_samples_without_anything_to_learn_have_no_loss(config: Config, evaluator: tuple[Evaluator, Model]) -> None:
    """Nothing is divided by zero."""
    evaluate, params = evaluator
    assert evaluate(params, Fixed(config, empty=True)) == {}


def test_an_evaluation_that_is_stopped_has_no_loss(config: Config, evaluator: tuple[Evaluator, Model]) -> None:
    evaluate, params = evaluator
    assert evaluate(params, Fixed(config), stop=lambda: True) is None
