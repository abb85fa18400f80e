"""Account of the samples that a run has read from every source, by which it goes on when the mix of sources changes.

The order of a source's samples does not depend on the mix, and a run reads it from the first sample on, so one number
per source tells what was read. With other sources or weights a run begins a new mix at its present sample and goes on
in every source where it stopped, so that no sample is skipped or repeated. Batch size, data parallelism and hosts only
cut this one stream, and change nothing in it. If a run needs more samples than the order of a source has, another order
of the same documents is read after it.
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
    """One source and the number of its samples that have been read."""

    prefix: str
    identity: str
    """Hash of its documents: another file is another source, but the same file under another name is not."""
    weight: float | None
    """Share in the mix, relative to the other sources; None = all sources are used whole."""
    orders: tuple[int | None, ...] = ()
    """Number of samples asked of each of its orders; None = one epoch."""
    first: int = 0
    """Number of its samples that were read before the mix began."""
    consumed: int = 0
    """Number of its samples that have been read so far."""


@dataclass(frozen=True)
class Mix:
    """The sources that a run reads from sample `start` on."""

    start: int
    sources: tuple[Reading, ...]
    left_out: tuple[Reading, ...] = ()
    """Sources of earlier mixes, which go on where they stopped if they come back."""

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
        before: mix of the checkpoint; None for a new run.
        samples: samples consumed by the run so far.
        wanted: sources of the configuration, as if none of them had been read.

    Returns:
        The mix of the checkpoint if it is the wanted one, else a new mix that begins here.

    Raises:
        InputError: a source that was read now holds other documents.
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
    """Return each source's share of the samples, which is not a number where sources are used whole."""
    total = sum(source.weight or 0.0 for source in sources)
    return [math.nan if source.weight is None else source.weight / total for source in sources]


class TrainingData:
    """Provide the training samples of a run, and keep account of the samples read from each source.

    Args:
        mix: mix of sources, whose orders reach to the end of the run.
        blend: dataset of the mix.
        per_epoch: number of samples in one pass over each source.
        scan: search for ids outside the vocabulary, which goes on with every batch.
    """

    def __init__(self, mix: Mix, blend: BlendedDataset, per_epoch: Sequence[float], scan: VocabularyScan):
        self.mix, self.blend, self._per_epoch, self._scan = mix, blend, per_epoch, scan

    def __len__(self) -> int:
        return len(self.blend)

    def batch(self, sample_ids: np.ndarray) -> Batch:
        """Return the rows of these samples."""
        self._scan.go_on()
        return self.blend.batch(sample_ids)

    def at(self, samples: int) -> Mix:
        """Return the mix with the samples read from every source after `samples` samples of the run."""
        counts = self.blend.consumed(samples)
        sources = [replace(source, consumed=n) for source, n in zip(self.mix.sources, counts, strict=True)]
        return replace(self.mix, sources=tuple(sources))

    def table(self, samples: int) -> list[str]:
        """Return lines that tell how much of every source was read after `samples` samples, and will be by the end."""
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
