"""Losses on held-out samples: the sum of token losses divided by the number of tokens, each sample counted once.

Each evaluation reads the same samples, the first ones of the split, so that its values can be compared along a run
(Megatron-LM moves on through the split).
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import numpy as np

from megajax.config.config import Config
from megajax.data.dataset import Dataset
from megajax.models.model import Batch, Model
from megajax.models.parameters import cast
from megajax.parallel.rules import Rules
from megajax.parallel.run import Runner
from megajax.training.batches import Feed, batch_shardings
from megajax.training.step import DTYPES, build_init, weighted

EvalStep = Callable[[Model, Batch], dict[str, tuple[jax.Array, jax.Array]]]


def build_eval_step(
    config: Config, rules: Rules, attention: str
) -> Callable[[Model, Batch], dict[str, tuple[jax.Array, jax.Array]]]:
    """Jit f(params, batch) -> (mean, number of unmasked tokens or labelled samples) of every loss, by its name.

    The losses are "lm loss" and, where samples have a label, "sop loss"; they are computed without dropout.
    """
    runner = Runner(rules, attention, chunks=config.parallel.chunks)

    def evaluate(params: Model, batch: Batch) -> dict[str, tuple[jax.Array, jax.Array]]:
        model = cast(params, DTYPES[config.train.precision])
        batch, counts = weighted(batch)
        losses = runner.losses(model, batch)
        return {name: (losses[name], count) for name, count in counts.items()}

    _, _, shardings = build_init(config, rules)
    return jax.jit(evaluate, in_shardings=(shardings.params, batch_shardings(rules, config.model, config.data)))


class Evaluator:
    """Compute the mean losses over some global batches of a split, the last of which may be short."""

    def __init__(self, step: EvalStep, feed: Feed, batch_size: int, batches: int) -> None:
        """Evaluate with the compiled `step`, for which `feed` cuts `batches` global batches of `batch_size` samples."""
        self._step, self._feed = step, feed
        self._batch_size, self._samples = batch_size, batch_size * batches

    def __call__(
        self, params: Model, dataset: Dataset, stop: Callable[[], bool] = lambda: False
    ) -> dict[str, float] | None:
        """Return the losses in nats per token (or sample) by name, without those that no token or sample counts for.

        `stop()` is asked after every batch by every process; once it is true, the result is None.
        """
        totals: dict[str, np.ndarray] = {}
        count = min(self._samples, len(dataset))
        rows = self._feed.rows(self._batch_size)
        for start in range(0, count, self._batch_size):
            # All batches have one compiled shape: rows past the end are empty samples, which the loss mask leaves out.
            batch = dataset.batch(np.where((ids := start + rows) < count, ids, len(dataset)))
            for name, (loss, n) in self._step(params, self._feed.place(batch, self._batch_size)).items():
                totals[name] = totals.get(name, np.zeros(2)) + np.array([float(loss) * float(n), float(n)])
            if stop():
                return None
        return {name: float(total / count) for name, (total, count) in totals.items() if count}
