"""The 64-bit Mersenne twister of the C++ library (std::mt19937_64), which NumPy lacks, and the shuffle made of it."""

from __future__ import annotations

import numpy as np

_N, _M = 312, 156
_LOW = np.uint64(2**31 - 1)
_MATRIX = np.uint64(0xB5026F5AA96619E9)
_TEMPER = tuple(map(np.uint64, (0x5555555555555555, 0x71D67FFFEDA60000, 0xFFF7EEE000000000)))


def mt19937_64(seed: int, count: int) -> np.ndarray:
    """Return the first `count` numbers of std::mt19937_64(seed), uint64 [count].

    Nishimura, "Tables of 64-bit Mersenne Twisters" (2000). The twist of word i reads words i + 1 and i + 156 (mod 312),
    of which the first half of the words finds the old values and the second half the new ones: two vector operations.
    """
    state = _seeded(seed)
    blocks = []
    for _ in range(-(-count // _N)):
        first = state[_M:] ^ _twist(state[:_M], state[1 : _M + 1])
        second = first ^ _twist(state[_M:], np.append(state[_M + 1 :], first[0]))
        state = np.concatenate([first, second])
        blocks.append(state)
    return _tempered(np.concatenate(blocks or [state])[:count])


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
    """Return 0 to count - 1 after Fisher and Yates's shuffle from the end: i changes places with (draw mod i + 1)."""
    i = np.arange(count - 1, 0, -1, dtype=np.uint64)
    partners = (mt19937_64(seed, len(i)) % (i + np.uint64(1))).tolist()
    order = list(range(count))
    for last, partner in zip(range(count - 1, 0, -1), partners, strict=True):
        order[last], order[partner] = order[partner], order[last]
    return np.array(order, np.int64)
