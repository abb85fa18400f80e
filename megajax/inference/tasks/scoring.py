"""Log-probabilities of given tokens, window by window, in batches over the mesh.

A text that is longer than the model's context is cut into windows: pieces whose last tokens are scored, and whose other
tokens are context.

Shapes: B rows of a batch, S tokens that the model reads at once.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import partial
from typing import NamedTuple

import jax
import numpy as np
from rich.console import Console

from megajax.config import InputError
from megajax.inference.scores import score_batch
from megajax.inference.trained import TrainedModel
from megajax.observe.progress import progress_bar
from megajax.processes import in_turn


class Window(NamedTuple):
    """A piece of a text whose last tokens are scored."""

    ids: Sequence[int] | np.ndarray
    """Tokens of the piece, at most S + 1."""
    scored: int
    """Number of scored tokens at the end of the piece, which never include its first token."""


class Scores(NamedTuple):
    """The scores that a model gives to the scored tokens of a window."""

    log_probabilities: np.ndarray
    """Log-probabilities [scored], fp32, in nats."""
    greedy: np.ndarray
    """Flags [scored], True where no other token is likelier."""

    @property
    def loss(self) -> float:
        """Return the sum of the tokens' losses."""
        return -float(self.log_probabilities.sum(dtype=np.float64))


def windows(ids: Sequence[int] | np.ndarray, length: int, stride: int) -> Iterator[Window]:
    """Cut a text so that every token but the first is scored once (Megatron-LM's --overlapping-eval).

    Window i reads the `length` tokens from i x stride on. All positions of the first window are scored, and the last
    `stride` positions of every other one. There are max(ceil(max(targets - stride, 0) / stride) + 1, 1) windows,
    without those that would score only padding.

    Args:
        ids: tokens of the text, at least 2.
        length: number of tokens S that a window reads.
        stride: 1 to S; S for windows that do not overlap, less for more context.
    """
    targets = len(ids) - 1
    for number in range(max(math.ceil(max(targets - stride, 0) / stride) + 1, 1)):
        start = number * stride
        first = 0 if number == 0 else start + length - stride
        if first < targets:
            piece = ids[start : start + length + 1]
            yield Window(piece, start + len(piece) - 1 - first)


def check_stride(stride: int | None, length: int) -> int:
    """Return the stride of windows of `length` tokens, which is `length` (no overlap) if unset.

    Raises:
        InputError: the stride would leave tokens out.
    """
    if stride is not None and not 1 <= stride <= length:
        raise InputError(f"--overlapping-eval is {stride}: expected 1 to {length}, the tokens that the model reads")
    return stride or length


class Scorer:
    """Score windows with one model; longer ones come first, so that an out-of-memory error comes at once."""

    def __init__(self, trained: TrainedModel, batch_size: int = 8, console: Console | None = None) -> None:
        """Prepare a scorer that runs `batch_size` rows together and draws progress on `console` (None = stderr)."""
        if batch_size < 1:
            raise InputError(f"batch size is {batch_size}: expected 1 or more")
        self.model, self._trained = trained.model, trained
        self.rows = -(-batch_size // trained.replicas) * trained.replicas
        self.console = console or Console(stderr=True)
        self._score = jax.jit(partial(score_batch, layout=trained.layout))

    def __call__(self, windows: Sequence[Window]) -> list[Scores]:
        """Return the scores of the windows, in their order."""
        order = sorted(range(len(windows)), key=lambda i: -len(windows[i].ids))
        found: dict[int, Scores] = {}
        if windows and self._trained.tokenizer.vocab_size > (self._trained.config.model.vocab_size or 0):
            for ids, _ in windows:
                self._trained.check_ids(ids, "the text")
        with progress_bar(len(windows), 0, self.console) as advance:
            for first in range(0, len(order), self.rows):
                batch = order[first : first + self.rows]
                found |= zip(batch, self._score_rows([windows[i] for i in batch]), strict=True)
                advance(len(found), "")
        return [found[i] for i in range(len(windows))]

    def _score_rows(self, batch: Sequence[Window]) -> list[Scores]:
        """Return the scores of windows of about the same length, the longest of which comes first."""
        tokens = np.zeros((self.rows, _width(len(batch[0].ids) - 1)), np.int32)
        labels = np.zeros_like(tokens)
        for i, (ids, _) in enumerate(batch):
            tokens[i, : len(ids) - 1], labels[i, : len(ids) - 1] = ids[:-1], ids[1:]
        scores = jax.device_get(in_turn(self._score(self.model, tokens, labels)))
        spans = [slice(len(ids) - 1 - scored, len(ids) - 1) for ids, scored in batch]
        return [Scores(*(a[i, span] for a in scores)) for i, span in enumerate(spans)]


def _width(tokens: int) -> int:
    """Return the length to which rows are padded, one of a few, so that few shapes are compiled."""
    step = 1 << max(0, tokens.bit_length() - 3)
    return -(-tokens // step) * step
