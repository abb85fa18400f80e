"""How one array lies in another, as text that reads both ways: `(K G H) D -> D K G H`.

Left are the dimensions of Hugging Face's tensor, right those of ours (one layer of it, one expert of that layer). What
stands in parentheses is one dimension that counts through several, the last one fastest. A number is a dimension of
that length, and 1 one that the other side need not have. Read from right to left it is the exact inverse.

    V words, P positions, T token types, D embed (C: once more, in a square matrix), N heads, K kv heads (= groups),
    G query heads a group, H head dim, R = H / 2, F mlp, X mlp of an expert, Y mlp that all tokens share, E experts,
    B buckets of relative positions
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import accumulate

import numpy as np

from megajax.config.model import ModelConfig

Dims = Mapping[str, int]


def dims(model: ModelConfig) -> dict[str, int]:
    """What the letters of a pattern stand for."""
    assert model.vocab_size is not None
    return {
        "V": model.vocab_size,
        "P": model.position_rows,
        "T": model.token_types,
        "D": model.hidden_size,
        "C": model.hidden_size,
        "N": model.num_heads,
        "K": model.kv_heads,
        "G": model.num_heads // model.kv_heads,
        "H": model.head_size,
        "R": model.head_size // 2,
        "F": model.ffn_size,
        "X": model.expert_size,
        "Y": model.shared_ffn_size,
        "E": model.experts,
        "B": model.relative_buckets,
    }


def rearrange(x: np.ndarray, pattern: str, sizes: Dims) -> np.ndarray:
    """An array laid out as the left side of the pattern says, as the right side says.

    Raises:
        ValueError: its shape is not that of the left side.
    """
    left, right = _sides(pattern)
    if x.shape != _shape(left, sizes):
        raise ValueError(f"{pattern}: the array is {x.shape}, expected {_shape(left, sizes)}")
    letters = [letter for group in left for letter in group]
    order = [letters.index(letter) for group in right for letter in group]
    return x.reshape(_shape([[letter] for letter in letters], sizes)).transpose(order).reshape(_shape(right, sizes))


def join(parts: Sequence[np.ndarray], patterns: Sequence[str], sizes: Dims) -> np.ndarray:
    """Their tensors -> one slice of our parameter: side by side where the pattern of the last one has its 1."""
    laid_out = [rearrange(part, pattern, sizes) for part, pattern in zip(parts, patterns, strict=True)]
    return np.concatenate(laid_out, _beside(patterns)) if len(laid_out) > 1 else laid_out[0]


def split(whole: np.ndarray, patterns: Sequence[str], sizes: Dims) -> list[np.ndarray]:
    """The inverse of `join`."""
    axis = _beside(patterns)
    lengths = [ours_shape(pattern, sizes)[axis] for pattern in patterns] if len(patterns) > 1 else []
    parts = np.split(whole, list(accumulate(lengths))[:-1], axis) if lengths else [whole]
    return [rearrange(part, _reverse(pattern), sizes) for part, pattern in zip(parts, patterns, strict=True)]


def theirs_shape(pattern: str, sizes: Dims) -> tuple[int, ...]:
    """Shape of the tensor on the left of a pattern."""
    return _shape(_sides(pattern)[0], sizes)


def ours_shape(pattern: str, sizes: Dims) -> tuple[int, ...]:
    """Shape of the slice on the right of a pattern."""
    return _shape(_sides(pattern)[1], sizes)


def joined_shape(patterns: Sequence[str], sizes: Dims) -> tuple[int, ...]:
    """Shape of what `join` gives."""
    shapes = [list(ours_shape(pattern, sizes)) for pattern in patterns]
    if len(shapes) > 1:
        axis = _beside(patterns)
        shapes[0][axis] = sum(shape[axis] for shape in shapes)
    return tuple(shapes[0])


def _beside(patterns: Sequence[str]) -> int:
    """The dimension along which several parts lie side by side."""
    return _sides(patterns[-1])[1].index([]) if len(patterns) > 1 else 0


def _reverse(pattern: str) -> str:
    left, right = pattern.split("->")
    return f"{right} -> {left}"


def _sides(pattern: str) -> tuple[list[list[str]], list[list[str]]]:
    left, right = pattern.split("->")
    return _groups(left), _groups(right)


def _groups(side: str) -> list[list[str]]:
    """`(K 3 H) D 1` -> [[K, 3, H], [D], []]."""
    groups: list[list[str]] = []
    inside = False
    for word in side.replace("(", " ( ").replace(")", " ) ").split():
        if word in "()":
            inside = word == "("
            groups += [[]] if inside else []
        elif inside:
            groups[-1].append(word)
        else:
            groups.append([] if word == "1" else [word])
    return groups


def _shape(groups: Sequence[Sequence[str]], sizes: Dims) -> tuple[int, ...]:
    return tuple(math.prod(sizes[word] if word in sizes else int(word) for word in group) for group in groups)
