"""The account of what a run has read of every source, and how it goes on when the mix of sources changes.

The order of the samples of a source does not depend on the mix it is part of, and a run reads it from its first sample
on: one number per source says what was read. With other sources or weights a run begins a new mix at the sample where
it stands, and takes up every source where it was left, so that no sample is passed over and none comes twice. Batch
size, data parallelism and hosts only cut this one stream, and change nothing in it. Where more samples are wanted than
the order of a source has, another order of the same documents is read after it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Self

import numpy as np

from megajax.config.base import InputError
from megajax.data.blend import BlendedDataset
from megajax.data.dataset import Batch
from megajax.data.vocabulary import VocabularyScan


@dataclass(frozen=True)
class Reading:
    """One source and how far it is read."""

    prefix: str
    identity: str
    """Hash of its documents: another file is another source, the same file under another name is not."""
    weight: float | None
    """Share in the mix, relative to the other sources; None = all of them are used whole."""
    orders: tuple[int | None, ...] = ()
    """Samples asked of each of its orders; None = one epoch."""
    first: int = 0
    """Samples of it that were read before the mix began."""
    consumed: int = 0
    """Samples of it that were read so far."""


@dataclass(frozen=True)
class Mix:
    """The sources that a run reads from sample `start` on."""

    start: int
    sources: tuple[Reading, ...]
    left_out: tuple[Reading, ...] = ()
    """Sources of earlier mixes; they go on from where they were left if they come back."""

    def to_record(self) -> dict[str, Any]:
        """Return the mix as JSON, for a checkpoint."""
        return asdict(self)

    @classmethod
    def from_record(cls, record: dict[str, Any]) -> Self:
        """Read the mix that a checkpoint was written under."""

        def readings(name: str) -> tuple[Reading, ...]:
            return tuple(Reading(**{**entry, "orders": tuple(entry["orders"])}) for entry in record[name])

        return cls(record["start"], readings("sources"), readings("left_out"))


def go_on(before: Mix | None, samples: int, wanted: Sequence[Reading]) -> Mix:
    """Decide where every source goes on.

    Args:
        before: the mix of the checkpoint; None for a new run.
        samples: consumed by the run so far.
        wanted: the sources of the configuration, nothing read of them yet.

    Returns:
        The mix of the checkpoint if it is the one wanted, else a new one that begins here.

    Raises:
        InputError: a source that was read holds other documents by now.
    """
    if before is None:
        return Mix(samples, tuple(wanted))
    known = {source.identity: source for source in (*before.left_out, *before.sources)}
    for source in wanted:
        if source.identity not in known and source.prefix in {old.prefix for old in known.values()}:
            raise InputError(
                f"{source.prefix} holds other documents than at the run's checkpoint: restore it, or use a new name"
            )
    if same_sources(before.sources, wanted):
        names = [source.prefix for source in wanted]
        kept = tuple(replace(old, prefix=name) for old, name in zip(before.sources, names, strict=True))
        return replace(before, sources=kept)
    sources = []
    for source in wanted:
        old = known.pop(source.identity, source)
        sources.append(replace(source, orders=old.orders, first=old.consumed, consumed=old.consumed))
    return Mix(samples, tuple(sources), tuple(replace(old, first=old.consumed) for old in known.values()))


def same_sources(before: Sequence[Reading], wanted: Sequence[Reading]) -> bool:
    """Tell whether two mixes draw the same sources in the same proportions."""
    if [source.identity for source in before] != [source.identity for source in wanted]:
        return False
    return np.allclose(shares(before), shares(wanted), rtol=1e-9, atol=0, equal_nan=True)


def shares(sources: Sequence[Reading]) -> list[float]:
    """Return what part of the samples each source gives; not a number where sources are used whole."""
    total = sum(source.weight or 0.0 for source in sources)
    return [math.nan if source.weight is None else source.weight / total for source in sources]


class TrainingData:
    """The training samples of a run, and the account of what was read of each source.

    Args:
        mix: what is read; its orders reach to the end of the run.
        blend: its samples.
        per_epoch: samples in one pass over each source.
        scan: goes on with every batch.
    """

    def __init__(self, mix: Mix, blend: BlendedDataset, per_epoch: Sequence[float], scan: VocabularyScan):
        self.mix, self.blend, self._per_epoch, self._scan = mix, blend, per_epoch, scan

    def __len__(self) -> int:
        return len(self.blend)

    def batch(self, sample_ids: np.ndarray) -> Batch:
        """Return the rows of some samples."""
        self._scan.go_on()
        return self.blend.batch(sample_ids)

    def at(self, samples: int) -> Mix:
        """Return the mix with what was read of every source after so many samples of the run."""
        counts = self.blend.consumed(samples)
        sources = [replace(source, consumed=n) for source, n in zip(self.mix.sources, counts, strict=True)]
        return replace(self.mix, sources=tuple(sources))

    def table(self, samples: int) -> list[str]:
        """Say, line by line, what was read of every source after so many samples and what will be by the end."""
        now, end = self.at(samples), self.at(len(self))
        title = "share      read  epochs  by the end  epochs"
        if samples and self.mix.start == samples:
            title += f"  (another mix from sample {samples:,} on)"
        lines = [title]
        readings = zip(now.sources, end.sources, shares(now.sources), self._per_epoch, strict=True)
        for source, last, share, per_epoch in readings:
            part = "whole" if math.isnan(share) else f"{share:.1%}"
            counts = (f"{n:>10,}{n / per_epoch:>8.2f}" for n in (source.consumed, last.consumed))
            lines.append(f"{part:>5}{'  '.join(counts)}  {source.prefix}")
        lines += [f"{'-':>5}{old.consumed:>10,}  left out: {old.prefix}" for old in now.left_out]
        return lines
