"""The 64-bit Mersenne twister of the C++ library (std::mt19937_64), which NumPy lacks, and the shuffle made of it."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice

import numpy as np

_N, _M = 312, 156
_BLOCK = 64 * _N
_LOW = np.uint64(2**31 - 1)
_MATRIX = np.uint64(0xB5026F5AA96619E9)
_TEMPER = tuple(map(np.uint64, (0x5555555555555555, 0x71D67FFFEDA60000, 0xFFF7EEE000000000)))


def mt19937_64(seed: int, count: int) -> np.ndarray:
    """Return the first `count` numbers of std::mt19937_64(seed), uint64 [count]."""
    blocks = list(islice(_blocks(seed), -(-count // _BLOCK)))
    return np.concatenate(blocks)[:count] if blocks else np.empty(0, np.uint64)


def _blocks(seed: int) -> Iterator[np.ndarray]:
    """Iterate over the numbers, so many at a time that the twister's own time is what counts.

    Nishimura, "Tables of 64-bit Mersenne Twisters" (2000). The twist of word i reads words i + 1 and i + 156 (mod 312),
    of which the first half of the words finds the old values and the second half the new ones: two vector operations.
    """
    state = _seeded(seed)
    while True:
        states = []
        for _ in range(_BLOCK // _N):
            first = state[_M:] ^ _twist(state[:_M], state[1 : _M + 1])
            second = first ^ _twist(state[_M:], np.append(state[_M + 1 :], first[0]))
            state = np.concatenate([first, second])
            states.append(state)
        yield _tempered(np.concatenate(states))


def _seeded(seed: int) -> np.ndarray:
    words = [seed % 2**64]
    for i in range(1, _N):
        words.append((6364136223846793005 * (words[-1] ^ (words[-1] >> 62)) + i) % 2**64)
    return np.array(words, np.uint64)


def _twist(high: np.ndarray, low: np.ndarray) -> np.ndarray:
    x = (high & ~_LOW) | (low & _LOW)
    return (x >> np.uint64(1)) ^ np.where(x & np.uint64(1), _MATRIX, np.uint64(0))


def _tempered(x: np.ndarray) -> np.ndarray:
    x = x ^ ((x >> np.uint64(29)) & _TEMPER[0])
    x = x ^ ((x << np.uint64(17)) & _TEMPER[1])
    x = x ^ ((x << np.uint64(37)) & _TEMPER[2])
    return x ^ (x >> np.uint64(43))


def shuffled(count: int, seed: int) -> np.ndarray:
    """Return 0 to count - 1, int64, after Fisher and Yates's shuffle from the end; takes little more than that.

    Number i changes places with number (draw mod i + 1).
    """
    order = np.arange(count)
    places = order.data  # Python reads and writes it faster than an array
    lasts = range(count - 1, 0, -1)
    for start, draws in zip(range(0, len(lasts), _BLOCK), _blocks(seed), strict=False):
        block = lasts[start : start + _BLOCK]
        partners = draws[: len(block)] % (np.array(block, np.uint64) + np.uint64(1))
        for last, partner in zip(block, partners.tolist(), strict=True):
            places[last], places[partner] = places[partner], places[last]
    return order
