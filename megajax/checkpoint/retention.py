"""Which checkpoints stay: one pure function of the steps, the configuration and the losses."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from megajax.config.train import CheckpointConfig


def kept(steps: Iterable[int], config: CheckpointConfig, losses: Mapping[int, float]) -> set[int]:
    """Steps whose checkpoints are kept.

    Args:
        steps: of the checkpoints that there are.
        config: the newest `keep_last` stay, and those whose step is a multiple of `keep_every`. With `keep_best` the
            one of lowest loss takes the place of one of the newest, but never that of the very newest.
        losses: validation losses by step; a checkpoint without one does not compete.
    """
    newest_first = sorted(steps, reverse=True)
    rated = [step for step in newest_first if math.isfinite(losses.get(step, math.nan))]
    best = {min(rated, key=losses.__getitem__)} if config.keep_best and rated else set()
    others = [step for step in newest_first if step not in best]
    places = max(config.keep_last - len(best), 0 if best == set(newest_first[:1]) else 1)
    multiples = {step for step in newest_first if config.keep_every and step % config.keep_every == 0}
    return best | set(others[:places]) | multiples


@dataclass
class Retention:
    """`kept` in the form in which Orbax asks for it; it deletes the others once a save has finished."""

    config: CheckpointConfig
    losses: dict[int, float] = field(default_factory=dict)

    def should_preserve(self, checkpoints: Sequence[Any], *, context: Any) -> list[bool]:
        """For every checkpoint in Orbax's list, the one being saved included, whether it stays."""
        del context
        keep = kept([checkpoint.step for checkpoint in checkpoints], self.config, self.losses)
        return [checkpoint.step in keep for checkpoint in checkpoints]
