"""Pipeline schedules: the microbatch and chunk that every stage works on in every tick.

`Interleaved1F1B` is the schedule that runs. It computes work from (tick, stage), on Python integers and on traced ones
alike, so that the executor, the planner, the drawings and the tests all call the same functions. `Schedule` holds a
schedule as data, with the time of every forward and backward; `gpipe` and `one_f_one_b` are there for comparison.

The P stages move in lock step. A stage holds v chunks of layers: with n = L / (v P), chunk c of stage s holds the n
layers from (c P + s) n on, so that a microbatch goes round the ring of stages v times. In a tick a stage runs the
forward of one chunk, then the backward of one chunk; at the end of the tick it sends the results to its neighbours.
Microbatches go in groups of P: the whole group passes one chunk, then the next one. On stage s in tick t

    the k-th forward runs, k = t - s, and the k-th backward, k = t - (v P - 1) - (P - 1 - s), where 0 <= k < v M;
    it belongs to group g = k // (v P), chunk c = (k % (v P)) // P (backward: v - 1 - c), microbatch m = g P + k % P.

    P = 3, v = 1, M = 4       tick  0   1   2      3      4      5      6   7
                           stage 0  F0  F1  F2 .   F3 .   .  B0  .  B1  B2  B3
                           stage 1  .   F0  F1 .   F2 B0  F3 B1  .  B2  B3  .
                           stage 2  .   .   F0 B0  F1 B1  F2 B2  F3 B3  .   .

Nothing branches on the stage: in the bubble (.) a stage computes on garbage and the result is masked. There are v P - 1
ticks of warm-up (forward only), v M - v P + P steady ticks and v P - 1 ticks of cool-down (backward only). As warm-up
and cool-down add up to v P - 1 whole ticks, a step takes (v M + P - 1) (F + B), where F and B are the times of a
chunk's forward and backward. The ideal is v M (F + B), so the bubble is (P - 1) / (v M), as in Megatron-LM (2104.04473,
section 2.2.2).

Every stage works in the order of Megatron-LM's interleaved 1F1B and keeps as many activations for the backward, at most
(v + 1) P - 1 - 2 s. Only for v = 1 does Megatron-LM use another order, which keeps P - s activations: its stages
alternate between forward and backward out of step with each other. On the last stage both orders are the same.

Letters: P stages, v chunks per stage, M microbatches, L layers, t tick, s stage.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, NamedTuple

import jax

from megajax.config.base import InputError

Index = int | jax.Array
Kind = Literal["F", "B"]
KINDS: tuple[Kind, Kind] = ("F", "B")


class Slot(NamedTuple):
    """The work of one stage in one direction of one tick."""

    valid: bool | jax.Array
    """Whether there is work; in the bubble the indices are in range all the same."""
    chunk: Index
    """Index of the chunk among the stage's v chunks."""
    microbatch: Index
    ring_slot: Index
    """Index of the buffer, among `ring_slots`, that holds the forward's activations until the backward."""


@dataclass(frozen=True)
class Interleaved1F1B:
    """Schedule that the executor runs; v = 1 is 1F1B without interleaving.

    Raises:
        InputError: a size is below 1, or v > 1 and the microbatches do not fill groups of P.
    """

    stages: int
    chunks: int
    microbatches: int

    def __post_init__(self) -> None:
        for name in ("stages", "chunks", "microbatches"):
            if getattr(self, name) < 1:
                raise InputError(f"pipeline {name} is {getattr(self, name)}: expected 1 or more")
        if self.chunks > 1:
            why = f"with {self.chunks} chunks per stage they go in groups of"
            _require_multiple(self.microbatches, "microbatches", why, self.stages)

    def layers_per_chunk(self, layers: int) -> int:
        """Return the number of layers in a chunk, n = L / (v P).

        Raises:
            InputError: the layers do not divide; the message names the nearest numbers that do.
        """
        why = f"{self.stages} pipeline stages x {self.chunks} chunks take multiples of"
        _require_multiple(layers, "layers", why, self.stages * self.chunks)
        return layers // (self.stages * self.chunks)

    # Phases

    @property
    def warmup_ticks(self) -> int:
        """Return the ticks before the first backward, which have forwards alone."""
        return self.stages * self.chunks - 1

    @property
    def steady_ticks(self) -> int:
        """Return the ticks with a forward and a backward each."""
        return self._slots - self.warmup_ticks + self.stages - 1

    @property
    def cooldown_ticks(self) -> int:
        """Return the ticks after the last forward, which have backwards alone."""
        return self.warmup_ticks

    @property
    def ticks(self) -> int:
        """Return the number of ticks in a step."""
        return self.warmup_ticks + self.steady_ticks + self.cooldown_ticks

    # Work

    def forward(self, tick: Index, stage: Index) -> Slot:
        """Return the forward of `stage` in `tick`, which is not in the cool-down."""
        return self._slot(tick - stage)

    def backward(self, tick: Index, stage: Index) -> Slot:
        """Return the backward of `stage` in `tick`, which is not in the warm-up; it runs after the forward of that
        tick.
        """
        k = tick - self.warmup_ticks - (self.stages - 1 - stage)
        return self._slot(self.forward_index_of_backward(k))

    def forward_index_of_backward(self, k: Index) -> Index:
        """Return the index of the forward that the k-th backward undoes.

        Both have the same place in their group, and backwards take the chunks in reverse order.
        """
        chunk = k // self.stages % self.chunks
        return k + (self.chunks - 1 - 2 * chunk) * self.stages

    def entering(self, tick: Index) -> Slot:
        """Return the microbatch that needs its embedding in `tick`, before the forward.

        A microbatch enters on stage 0, chunk 0.
        """
        slot = self.forward(tick, 0)
        return slot._replace(valid=slot.valid & (slot.chunk == 0))

    def leaving(self, tick: Index) -> Slot:
        """Return the microbatch that needs head and loss in `tick`, between the forward and the backward."""
        slot = self.forward(tick, self.stages - 1)
        return slot._replace(valid=slot.valid & (slot.chunk == self.chunks - 1))

    def embedding_backward(self, tick: Index) -> Slot:
        """Return the microbatch whose gradient reaches the embedding in `tick`, after the backward."""
        slot = self.backward(tick, 0)
        return slot._replace(valid=slot.valid & (slot.chunk == 0))

    # Costs

    @property
    def ring_slots(self) -> int:
        """Return the number of buffers for activations on each stage, which does not depend on M."""
        return 2 * self.stages - 1 if self.chunks == 1 else (self.chunks + 1) * self.stages

    def in_flight(self, stage: int) -> int:
        """Return the largest number of chunk activations that wait for their backward on `stage` at once."""
        return min(self._slots, (self.chunks + 1) * self.stages - 1 - 2 * stage)

    @property
    def bubble_fraction(self) -> float:
        """Return the idle time over the ideal time, (P - 1) / (v M)."""
        return (self.stages - 1) / self._slots

    @property
    def _slots(self) -> int:
        """Return the number of forwards of a stage, which equals the number of its backwards."""
        return self.chunks * self.microbatches

    def _slot(self, k: Index) -> Slot:
        """Return the k-th forward of a stage."""
        group, chunk, lane = k // (self.chunks * self.stages), k // self.stages % self.chunks, k % self.stages
        # A buffer is free again 2 (v - c) P - 1 - 2 s ticks after chunk c took it. Chunk v - c of the next group runs 2
        # (v - c) P ticks later and may take it; for c = 0, so may the group after the next. As this holds for every
        # integer k, not even the masked forwards before the first and after the last one overwrite a buffer in use.
        pair = chunk + group % 2 * (self.chunks - 2 * chunk)  # c in even groups, v - c in odd ones
        ring_slot = k % self.ring_slots if self.chunks == 1 else pair * self.stages + lane
        valid = (k >= 0) & (k < self._slots)
        return Slot(valid, chunk, (group * self.stages + lane) % self.microbatches, ring_slot)


FORWARD, BACKWARD = 1, 2
"""Times of a chunk's forward and backward, in the unit of `Schedule`."""


class Work(NamedTuple):
    """The forward or backward of one chunk for one microbatch, with its start time."""

    start: int
    kind: Kind
    chunk: int
    microbatch: int

    @property
    def end(self) -> int:
        """Return the time at which this work is done and the next can start."""
        return self.start + (FORWARD if self.kind == "F" else BACKWARD)


@dataclass(frozen=True)
class Schedule:
    """The work of every stage, with its times."""

    name: str
    chunks: int
    microbatches: int
    stages: Sequence[Sequence[Work]]
    """Work of every stage, in order of time."""

    @cached_property
    def length(self) -> int:
        """Return the time that a step takes."""
        return max(work.end for stage in self.stages for work in stage)

    @property
    def bubble_fraction(self) -> float:
        """Return the idle time over the ideal time, which is the same on all stages."""
        busy = sum(work.end - work.start for work in self.stages[0])
        return (self.length - busy) / busy

    def in_flight(self, stage: int) -> int:
        """Return the largest number of chunk activations that wait for their backward on `stage` at once."""
        most = now = 0
        for work in self.stages[stage]:
            now += 1 if work.kind == "F" else -1
            most = max(most, now)
        return most

    def label(self, work: Work) -> str:
        """Return F or B, the chunk if there are several, and the microbatch: `F3`, `B1.12`."""
        chunk = f"{work.chunk}." if self.chunks > 1 else ""
        return f"{work.kind}{chunk}{work.microbatch}"

    def order(self, stage: int) -> str:
        """Return the labels of a stage's work, in order."""
        return " ".join(self.label(work) for work in self.stages[stage])


def interleaved(stages: int, chunks: int, microbatches: int) -> Schedule:
    """Build the schedule of `Interleaved1F1B` tick by tick, as the executor runs it."""
    rule = Interleaved1F1B(stages, chunks, microbatches)
    rows: list[list[Work]] = [[] for _ in range(stages)]
    now = 0
    for tick in range(rule.ticks):
        forward = tick < rule.warmup_ticks + rule.steady_ticks
        backward = tick >= rule.warmup_ticks
        middle = now + FORWARD * forward
        for stage, row in enumerate(rows):
            if forward and (slot := rule.forward(tick, stage)).valid:
                row.append(Work(now, "F", int(slot.chunk), int(slot.microbatch)))
            if backward and (slot := rule.backward(tick, stage)).valid:
                row.append(Work(middle, "B", int(slot.chunk), int(slot.microbatch)))
        now = middle + BACKWARD * backward
    return Schedule("interleaved 1F1B" if chunks > 1 else "1F1B in lock step", chunks, microbatches, rows)


def gpipe(stages: int, microbatches: int) -> Schedule:
    """Build the schedule of GPipe: all forwards, then all backwards (1811.06965; order of 2104.04473, figure 3)."""
    forwards, backwards = _each("F", microbatches), _each("B", microbatches)
    return _play("GPipe", microbatches, [forwards + backwards] * stages)


def one_f_one_b(stages: int, microbatches: int) -> Schedule:
    """Build Megatron-LM's schedule without interleaving (PipeDream-flush; 2104.04473, figure 4 top)."""
    forwards, backwards = _each("F", microbatches), _each("B", microbatches)
    orders = []
    for stage in range(stages):
        warmup = min(stages - 1 - stage, microbatches)
        pairs = [work for pair in zip(forwards[warmup:], backwards, strict=False) for work in pair]
        orders.append(forwards[:warmup] + pairs + backwards[microbatches - warmup :])
    return _play("1F1B", microbatches, orders)


def _each(kind: Kind, microbatches: int) -> list[tuple[Kind, int]]:
    return [(kind, microbatch) for microbatch in range(microbatches)]


def _play(name: str, microbatches: int, orders: Sequence[Sequence[tuple[Kind, int]]]) -> Schedule:
    """Start each forward and backward as early as its order on the stage and its inputs from the neighbour allow."""
    rows: list[list[Work]] = [[] for _ in orders]
    ends: dict[tuple[str, int, int], int] = {}
    while any(len(row) < len(order) for row, order in zip(rows, orders, strict=True)):
        for stage, (row, order) in enumerate(zip(rows, orders, strict=True)):
            for kind, microbatch in order[len(row) :]:
                neighbour = stage - 1 if kind == "F" else stage + 1
                needed = (kind, microbatch, neighbour)
                if needed not in ends and 0 <= neighbour < len(rows):
                    break
                start = max(ends.get(needed, 0), row[-1].end if row else 0)
                row.append(Work(start, kind, 0, microbatch))
                ends[kind, microbatch, stage] = row[-1].end
    return Schedule(name, 1, microbatches, rows)


def _require_multiple(value: int, name: str, why: str, divisor: int) -> None:
    if value % divisor:
        lower = value // divisor * divisor
        near = " or ".join(str(n) for n in (lower, lower + divisor) if n)
        raise InputError(f"{value} {name}: {why} {divisor} ({value} % {divisor} = {value % divisor}): use {near}")
