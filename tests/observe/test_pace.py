"""Step times in percentiles, and the processes that are slower than the others."""

import numpy as np
import pytest

from megajax.observe.goodput import Clock
from megajax.observe.pace import ENOUGH, REMEMBERED, Pace, describe_hosts, find_stragglers

NAMES = ("node-1", "node-1", "node-2", "node-2")


class Hands:
    """A clock's time, moved by hand."""

    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


@pytest.fixture
def hands():
    return Hands()


def take_step(clock, hands, host=0.0, waits=0.0, device=0.0):
    with clock.during("input"):
        hands.now += waits
    hands.now += host
    with clock.during("device"):
        hands.now += device


def test_lap_has_input_and_no_evaluation(hands):
    clock = Clock(hands)
    hands.now = 100.0  # before the loop
    pace = Pace(clock)
    pace.start()
    take_step(clock, hands, host=7.0, waits=2.0, device=1.0)  # compiles, and the loader comes up
    assert pace.own_seconds() == [0.0, 0.0]
    assert pace.lap() == (10.0, 2.0)
    with clock.during("evaluation"):
        hands.now += 50
    take_step(clock, hands, host=0.25, waits=0.5, device=1.25)
    assert pace.lap() == (2.0, 0.5)
    assert pace.own_seconds() == [0.5, 0.25]
    assert pace.own_seconds() == [0.0, 0.0]


def test_percentiles(hands):
    clock = Clock(hands)
    pace = Pace(clock)
    assert pace.percentiles() == {}
    for milliseconds in (60_000, *range(1, 101)):
        take_step(clock, hands, device=milliseconds / 1000)
        pace.lap()
    # NumPy's linear interpolation between the 1st and 100th of 100 values.
    expected = {"p50": 0.0505, "p90": 0.0901, "p99": 0.09901, "max": 0.1}
    assert pace.percentiles() == pytest.approx(expected)
    assert pace.percentiles(last=3) == pytest.approx({"p50": 0.099, "p90": 0.0998, "p99": 0.09998, "max": 0.1})
    assert pace.describe() == "step time of the last 100 steps: p50 50.5 ms, p90 90.1 ms, p99 99.0 ms, max 100.0 ms"


def test_memory_is_bounded(hands):
    clock = Clock(hands)
    pace = Pace(clock)
    for _ in range(REMEMBERED + 10):
        pace.lap()
    assert f"last {REMEMBERED} steps" in pace.describe()


def test_hosts_are_measured_against_the_steps_since(hands):
    clock = Clock(hands)
    pace = Pace(clock)
    table, names = np.array([[0.01, 0.1], [0.01, 0.1], [5.0, 0.1]]), ("a", "b", "c")
    for device in (60.0, *ENOUGH * [1.0]):
        take_step(clock, hands, device=device)
        pace.lap()
    assert "in 10.0 s of steps" in pace.hosts(table, names)
    assert pace.hosts(table, names) is None  # no step since


def test_nobody_is_called_slow_after_a_few_steps(hands):
    """Two steps were enough. What was measured in them is not lost."""
    clock = Clock(hands)
    pace = Pace(clock)
    slow, fine = np.array([[0.01, 0.1], [2.0, 0.1]]), np.array([[0.1, 0.1], [0.1, 0.1]])
    for step in range(ENOUGH + 1):
        take_step(clock, hands, device=1.0)
        pace.lap()
        said = pace.hosts(slow if step == 1 else fine, ("a", "b"))
        assert (said is not None) == (step == ENOUGH)
    # 9 steps of 0.1 s and one of 0.01 or 2 s, and what the first has given: 0.1 s
    assert said.endswith("slow: process 1 (b), input 3.000 s (median 1.010 s)")


@pytest.mark.parametrize(
    ("seconds", "slow"),
    [
        ([1.0, 1.0, 1.0, 1.0], []),
        ([1.0, 1.0, 1.4, 1.0], []),  # below 1.5 times the median
        ([1.0, 1.0, 1.6, 1.0], [2]),
        ([0.001, 0.001, 0.1, 0.001], []),  # a hundred times, but of nothing
        ([1.0, 9.0], [1]),  # of two, the slower
        ([0.0, 0.0, 2.0, 3.0], [2, 3]),
    ],
)
def test_who_is_slow(seconds, slow):
    assert find_stragglers(np.array(seconds), wall=10.0) == slow


def test_table_and_names():
    table = np.array([[0.010, 1.0], [0.012, 1.1], [4.130, 1.2], [0.013, 1.0]], np.float32)
    assert describe_hosts(table, 12.34, NAMES).split("\n") == [
        "(min, median, max) over 4 processes, seconds in 12.3 s of steps:",
        "    input...........: (0.010, 0.012, 4.130)",
        "    host............: (1.000, 1.000, 1.200)",
        "slow: process 2 (node-2), input 4.130 s (median 0.012 s)",
    ]


def test_silence():
    assert describe_hosts(np.ones((4, 2)), 10.0, NAMES) is None
    assert describe_hosts(np.ones((1, 2)), 10.0, NAMES[:1]) is None
