"""Pipeline schedules, executed symbolically for every small size, and compared with Megatron-LM's documented orders."""

from itertools import pairwise

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from megajax.config.base import InputError
from megajax.parallel.pipeline.schedule import Interleaved1F1B, gpipe, interleaved, one_f_one_b

SIZES = [
    (stages, chunks, microbatches)
    for stages in range(1, 9)
    for chunks in range(1, 5)
    for microbatches in range(1, 33)
    if chunks == 1 or microbatches % stages == 0
]
"""Stages, chunks, microbatches."""


class Simulator:
    """The stages of a pipeline passing names of tensors around, as the executor does with the tensors.

    Name m B + b: block b (layers in order, 0 to B - 1) has worked on microbatch m. Garbage is -1.
    """

    def __init__(self, rule: Interleaved1F1B) -> None:
        self.rule = rule
        self.stage = np.arange(rule.stages)
        self.blocks = rule.stages * rule.chunks
        self.inbox = np.full(rule.stages, -1)
        self.gradient_inbox = np.full(rule.stages, -1)
        self.ring = np.full((rule.stages, rule.ring_slots), -1)
        self.left = self.embedded = 0
        self.forwards, self.backwards = ([[] for _ in self.stage] for _ in range(2))
        self.alive, self.most_alive = np.zeros(rule.stages, int), np.zeros(rule.stages, int)

    def run(self) -> None:
        rule = self.rule
        for tick in range(rule.ticks):
            if tick < rule.warmup_ticks + rule.steady_ticks:
                self.forward(tick)
            if tick >= rule.warmup_ticks:
                self.backward(tick)

    def forward(self, tick: int) -> None:
        slot = self.rule.forward(tick, self.stage)
        block = slot.chunk * self.rule.stages + self.stage
        name = slot.microbatch * self.blocks + block
        entering = self.rule.entering(tick)
        assert entering.valid == (slot.valid[0] and block[0] == 0)
        assert not entering.valid or entering.microbatch == slot.microbatch[0]
        assert np.all((self.inbox == name - 1) | (block == 0) | ~slot.valid)
        self.ring[self.stage, slot.ring_slot] = out = np.where(slot.valid, name, -1)
        self.alive += slot.valid
        self.most_alive = np.maximum(self.most_alive, self.alive)
        record(self.forwards, slot)
        leaving = self.rule.leaving(tick)
        assert leaving.valid == (out[-1] >= 0 and block[-1] == self.blocks - 1)
        self.leaving = leaving.microbatch if leaving.valid else -1
        self.left += leaving.valid
        self.inbox = np.roll(out, 1)

    def backward(self, tick: int) -> None:
        slot = self.rule.backward(tick, self.stage)
        block = slot.chunk * self.rule.stages + self.stage
        name = slot.microbatch * self.blocks + block
        last = block == self.blocks - 1
        from_loss = last & (slot.microbatch == self.leaving)
        assert np.all((self.gradient_inbox == name + 1) & ~last | from_loss | ~slot.valid)
        assert np.all((self.ring[self.stage, slot.ring_slot] == name) | ~slot.valid)
        self.alive -= slot.valid
        record(self.backwards, slot)
        done = self.rule.embedding_backward(tick)
        assert done.valid == (slot.valid[0] and block[0] == 0)
        assert not done.valid or done.microbatch == slot.microbatch[0] == self.embedded  # in order
        self.embedded += done.valid
        self.gradient_inbox = np.roll(np.where(slot.valid, name, -1), -1)


def record(done, slot):
    """Add the (chunk, microbatch) that each stage has worked on."""
    for stage in np.flatnonzero(slot.valid):
        done[stage].append((int(slot.chunk[stage]), int(slot.microbatch[stage])))


@pytest.mark.parametrize(("stages", "chunks"), sorted({size[:2] for size in SIZES}))
def test_everything_is_made_before_it_is_used_and_kept_until_then(stages, chunks):
    for microbatches in [m for p, v, m in SIZES if (p, v) == (stages, chunks)]:
        rule = Interleaved1F1B(stages, chunks, microbatches)
        pipeline = Simulator(rule)
        pipeline.run()

        everything = [(chunk, microbatch) for chunk in range(chunks) for microbatch in range(microbatches)]
        for done in pipeline.forwards + pipeline.backwards:
            assert sorted(done) == everything
            for chunk in range(chunks):  # gradients add up in the same order whatever the number of stages
                assert [m for c, m in done if c == chunk] == list(range(microbatches))
        assert pipeline.left == pipeline.embedded == microbatches
        assert list(pipeline.most_alive) == [rule.in_flight(stage) for stage in range(stages)]
        assert rule.in_flight(0) <= min(rule.ring_slots, 2 * chunks * stages - 1)


def test_lengths_of_the_phases():
    rule = Interleaved1F1B(stages=8, chunks=3, microbatches=16)
    assert (rule.warmup_ticks, rule.steady_ticks, rule.cooldown_ticks, rule.ticks) == (23, 32, 23, 78)
    for size in SIZES:
        rule = Interleaved1F1B(*size)
        forward = [tick for tick in range(rule.ticks) if any(rule.forward(tick, s).valid for s in (0, size[0] - 1))]
        backward = [tick for tick in range(rule.ticks) if any(rule.backward(tick, s).valid for s in (0, size[0] - 1))]
        assert (forward[-1], backward[0]) == (rule.warmup_ticks + rule.steady_ticks - 1, rule.warmup_ticks)
        assert (forward[0], backward[-1]) == (0, rule.ticks - 1)


def test_places_for_activations():
    """One more chunk than a stage has, times the stages; one activation where nothing is pipelined."""
    assert Interleaved1F1B(8, 3, 64).ring_slots == 32
    assert Interleaved1F1B(8, 1, 64).ring_slots == 15
    assert Interleaved1F1B(1, 1, 64).ring_slots == 1


@pytest.mark.parametrize("size", [(1, 1, 5), (4, 1, 3), (4, 1, 9), (3, 2, 6), (4, 3, 8)], ids=str)
def test_traced_indices_agree_with_integers(size):
    rule = Interleaved1F1B(*size)

    def ask(tick, stage):
        at_tick = rule.entering(tick), rule.leaving(tick), rule.embedding_backward(tick)
        return rule.forward(tick, stage), rule.backward(tick, stage), *at_tick

    ticks, stages = np.indices((rule.ticks, rule.stages))
    traced = jax.jit(jax.vmap(ask))(jnp.asarray(ticks.ravel()), jnp.asarray(stages.ravel()))
    plain = [ask(int(tick), int(stage)) for tick, stage in zip(ticks.ravel(), stages.ravel(), strict=True)]
    jax.tree.map(np.testing.assert_array_equal, traced, jax.tree.map(lambda *leaves: np.stack(leaves), *plain))
    assert isinstance(plain[0][0].valid, bool)
    assert isinstance(plain[0][0].ring_slot, int)
    for slot in traced:
        for index, length in zip(slot[1:], (rule.chunks, rule.microbatches, rule.ring_slots), strict=True):
            assert index.min() >= 0  # in range even where it means nothing
            assert index.max() < length


def test_sizes_that_do_not_fit():
    with pytest.raises(InputError, match=r"^6 microbatches: .* groups of 4 \(6 % 4 = 2\): use 4 or 8$"):
        Interleaved1F1B(stages=4, chunks=2, microbatches=6)
    with pytest.raises(InputError, match=r"use 4$"):
        Interleaved1F1B(stages=4, chunks=2, microbatches=3)
    with pytest.raises(InputError, match="pipeline chunks is 0"):
        Interleaved1F1B(stages=4, chunks=0, microbatches=4)


@pytest.mark.parametrize(("layers", "stages", "near"), [(80, 16, "64 or 96"), (40, 8, "32 or 48"), (3, 2, "4")])
def test_layers_are_never_dropped(layers, stages, near):
    rule = Interleaved1F1B(stages, 2, stages)
    with pytest.raises(InputError, match=rf"{layers} % {2 * stages} = {layers % (2 * stages)}\): use {near}$"):
        rule.layers_per_chunk(layers)
    assert rule.layers_per_chunk(6 * stages) == 3


def test_plain_1f1b_is_megatrons():
    schedule = one_f_one_b(stages=4, microbatches=6)
    assert [schedule.order(stage) for stage in range(4)] == [
        "F0 F1 F2 F3 B0 F4 B1 F5 B2 B3 B4 B5",
        "F0 F1 F2 B0 F3 B1 F4 B2 F5 B3 B4 B5",
        "F0 F1 B0 F2 B1 F3 B2 F4 B3 F5 B4 B5",
        "F0 B0 F1 B1 F2 B2 F3 B3 F4 B4 F5 B5",
    ]


def test_interleaved_1f1b_is_megatrons():
    schedule = interleaved(stages=2, chunks=2, microbatches=4)
    assert [schedule.order(stage) for stage in range(2)] == [
        "F0.0 F0.1 F1.0 F1.1 F0.2 B1.0 F0.3 B1.1 F1.2 B0.0 F1.3 B0.1 B1.2 B1.3 B0.2 B0.3",
        "F0.0 F0.1 F1.0 B1.0 F1.1 B1.1 F0.2 B0.0 F0.3 B0.1 F1.2 B1.2 F1.3 B1.3 B0.2 B0.3",
    ]


def test_one_chunk_in_lock_step_is_megatrons_1f1b_on_the_last_stage():
    """Before it the stages hold twice the activations, for the same bubble."""
    lock_step, plain = interleaved(4, 1, 12), one_f_one_b(4, 12)
    assert lock_step.order(3) == plain.order(3)
    assert [lock_step.in_flight(stage) for stage in range(4)] == [7, 5, 3, 1]
    assert [plain.in_flight(stage) for stage in range(4)] == [4, 3, 2, 1]
    assert lock_step.bubble_fraction == plain.bubble_fraction == 3 / 12


@pytest.mark.parametrize("stages", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("chunks", [1, 2, 3])
@pytest.mark.parametrize("groups", [1, 2, 4])
def test_order_and_costs_for_other_sizes(stages, chunks, groups):
    """Megatron-LM's formulas: warm-up 2 (p - r - 1) + (v - 1) p forwards, bubble (p - 1) / vm."""
    microbatches = groups * stages
    rule, schedule = Interleaved1F1B(stages, chunks, microbatches), interleaved(stages, chunks, microbatches)
    table = [(c, g * stages + i) for g in range(groups) for c in range(chunks) for i in range(stages)]
    forwards = [("F", c, m) for c, m in table]
    backwards = [("B", chunks - 1 - c, m) for c, m in table]
    for stage, row in enumerate(schedule.stages):
        warmup = min(2 * (stages - stage - 1) + (chunks - 1) * stages, len(table))
        steady = [work for pair in zip(forwards[warmup:], backwards, strict=False) for work in pair]
        expected = forwards[:warmup] + steady + backwards[len(table) - warmup :]
        assert [(work.kind, work.chunk, work.microbatch) for work in row] == expected
        assert schedule.in_flight(stage) == rule.in_flight(stage) == min(warmup + 1, len(table))
        assert all(before.end <= after.start for before, after in pairwise(row))
    assert schedule.bubble_fraction == rule.bubble_fraction == (stages - 1) / (chunks * microbatches)


@pytest.mark.parametrize("stages", [1, 2, 5])
@pytest.mark.parametrize("microbatches", [1, 3, 5, 12])
def test_schedules_without_interleaving_have_one_bubble(stages, microbatches):
    everything_first, alternating = gpipe(stages, microbatches), one_f_one_b(stages, microbatches)
    for schedule in (everything_first, alternating, interleaved(stages, 1, microbatches)):
        assert schedule.bubble_fraction == (stages - 1) / microbatches  # above 1 where the microbatches are few
        assert schedule.length == 3 * (microbatches + stages - 1)
    assert [everything_first.in_flight(stage) for stage in range(stages)] == [microbatches] * stages
    assert [alternating.in_flight(s) for s in range(stages)] == [min(stages - s, microbatches) for s in range(stages)]
