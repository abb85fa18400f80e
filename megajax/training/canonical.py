"""A train state as checkpoints hold it: weights of all layers in one stack [L, ...], whatever the pipeline.

An interleaved pipeline keeps them as [chunks, L / chunks, ...], cut over `pipe` in the second dimension. Going from one
form to the other is a reshape of every stacked array and an exchange over `pipe`, once per save or restore.
"""

from __future__ import annotations

import jax

from megajax.in_turn import in_turn
from megajax.models.parameters import join_layers, split_layers
from megajax.parallel.rules import Rules
from megajax.training.state import TrainState


class CanonicalForm:
    """To and from the form of checkpoints; with one chunk per stage both are the state itself."""

    def __init__(self, abstract: TrainState, shardings: TrainState, rules: Rules, chunks: int) -> None:
        """`abstract` and `shardings` describe the state as the training step holds it."""
        self.interleaved = chunks > 1
        self.abstract = jax.eval_shape(join_layers, abstract) if self.interleaved else abstract
        self.shardings = rules.shardings(self.abstract)
        self._join = jax.jit(join_layers, out_shardings=self.shardings)
        self._split = jax.jit(lambda state: split_layers(state, chunks), out_shardings=shardings, donate_argnums=0)

    def of(self, state: TrainState) -> TrainState:
        """The state in the form of checkpoints."""
        return in_turn(self._join(state)) if self.interleaved else state

    def back(self, state: TrainState) -> TrainState:
        """The state in the form of the training step."""
        return in_turn(self._split(state)) if self.interleaved else state
