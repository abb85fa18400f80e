"""Stragglers are named, with what they are slow at; nothing is said when all is well."""

import numpy as np
import pytest

from megajax.observe.pace import describe_hosts, find_stragglers

NAMES = ("node-1", "node-1", "node-2", "node-2")


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
