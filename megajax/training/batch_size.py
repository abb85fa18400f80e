"""Global batch size as a function of consumed samples: constant, or Megatron-LM's linear ramp-up in equal increments.

A ramp (start, increment, samples) climbs from `start` to the final size in k = (final - start) / increment increments,
spread evenly over `samples`. The size of a step follows from the samples consumed before it.
"""

from __future__ import annotations

from dataclasses import dataclass

from megajax.config.base import InputError
from megajax.config.train import TrainConfig


@dataclass(frozen=True)
class BatchSizeRamp:
    """The global batch size of every step, in samples; `start == final` is a constant batch size."""

    start: int
    increment: int
    ramp_samples: int
    final: int

    @classmethod
    def from_config(cls, train: TrainConfig) -> BatchSizeRamp:
        """Return the ramp of `train.rampup` (checked by `TrainConfig`), or a constant `train.global_batch_size`."""
        final = train.global_batch_size
        start, increment, ramp_samples = train.rampup or (final, 1, 0)
        return cls(start, increment, ramp_samples, final)

    @property
    def sizes(self) -> tuple[int, ...]:
        """List all batch sizes of the run in ascending order; each gets a compiled step."""
        return tuple(range(self.start, self.final + 1, self.increment))

    def batch_size_at(self, consumed: int) -> int:
        """Return the global batch size of the step that starts after `consumed` samples."""
        if consumed > self.ramp_samples:
            return self.final
        # Integer form of floor(consumed / (ramp_samples / k)): nothing is rounded where the size changes.
        increments = consumed * (len(self.sizes) - 1) // max(self.ramp_samples, 1)
        return min(self.final, self.start + increments * self.increment)

    def length(self, train: TrainConfig, step: int = 0, consumed: int = 0) -> tuple[int, int]:
        """Return the total steps and samples of a run, of which `step` steps and `consumed` samples are done.

        Raises:
            InputError: the run has no step.
        """
        if train.steps:
            return train.steps, consumed + max(0, train.steps - step) * self.final
        samples = train.samples or 0
        steps = step + self.steps_for_samples(samples, consumed)
        if steps == 0:
            raise InputError(f"train.samples {samples} is less than one global batch: raise it")
        return steps, samples

    def steps_for_samples(self, samples: int, consumed: int = 0) -> int:
        """Count the whole steps between `consumed` and `samples`; a last part of less than a batch is not used."""
        steps = 0
        while consumed <= self.ramp_samples:
            size = self.batch_size_at(consumed)
            if consumed + size > samples:
                return steps
            consumed += size
            steps += 1
        return steps + max(0, samples - consumed) // self.final
