"""Patterns of how one array lies in another, as text that reads both ways: `(K G H) D -> D K G H`.

On the left are the dimensions of the tensor in a file, on the right those of ours (one layer of it, one expert of that
layer). Parentheses hold one dimension that counts through several, the last one fastest. A number is a dimension of
that length, and a 1 need not be there on the other side. Read from right to left, a pattern is the exact inverse.

    V words, P positions, T token types, D embed (C: once more, in a square matrix), N heads, K kv heads (= groups),
    G query heads a group, Q = G + 2 (with key and value), H head dim, R = H / 2, F mlp, X mlp of an expert, Y mlp that
    all tokens share, A input matrices of an mlp (2 if gated, else 1), E experts, B buckets of relative positions
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import accumulate

import numpy as np

from megajax.config.model import ModelConfig

Dims = Mapping[str, int]
Table = Mapping[str, Mapping[str, str]]
"""Our parameter -> the tensors of which it is made and the pattern of each, in the order in which they lie side by
side. Names have a {layer}, and an {expert}, where the parameter has one more dimension. A table may have rows of
parameters that a model lacks."""


def norm(ours: str, theirs: str, pattern: str = "D -> D") -> Table:
    """Return the rows of a norm with gain and bias."""
    return {f"{ours}.scale": {f"{theirs}.weight": pattern}, f"{ours}.bias": {f"{theirs}.bias": pattern}}


def dense(ours: str, theirs: str | Sequence[str], weight: str, bias: str = "") -> Table:
    """Return the rows of a linear layer, which may be several side by side, all with the same patterns.

    Args:
        ours: name of the weight, to which "_bias" is added for the bias.
        theirs: name of the layer, or names of several.
        weight: pattern of the weight, such as "F D -> D 1 F".
        bias: pattern of the bias, or "" for a layer without one.
    """
    names = (theirs,) if isinstance(theirs, str) else theirs
    weights: Table = {ours: {f"{name}.weight": weight for name in names}}
    return {**weights, f"{ours}_bias": {f"{name}.bias": bias for name in names}} if bias else weights


def projections(ours: str, query: str, key: str, value: str, *, bias: bool = True) -> Table:
    """Return the rows of queries, keys and values that come from three layers; keys and values may have fewer heads."""
    patterns = {query: "(K G H){} -> {}K G H", key: "(K H){} -> {}K 1 H", value: "(K H){} -> {}K 1 H"}
    weights: Table = {ours: {f"{name}.weight": pattern.format(" D", "D ") for name, pattern in patterns.items()}}
    biases = {f"{name}.bias": pattern.format("", "") for name, pattern in patterns.items()}
    return {**weights, f"{ours}_bias": biases} if bias else weights


def interleaved(table: Table) -> Table:
    """Change a table for weights whose rotary embedding turns neighbours (2 i, 2 i + 1), as in LLaMA's first release.

    Ours turns (i, i + H / 2), so the even rows of every query and key head come first.
    """

    def turned(name: str, pattern: str) -> str:
        if ".q_proj." not in name and ".k_proj." not in name:
            return pattern
        left, right = pattern.split("->")
        return f"{left.replace('H', 'R 2')}->{right.replace('H', '(2 R)')}"

    return {ours: {name: turned(name, pattern) for name, pattern in row.items()} for ours, row in table.items()}


def dims(model: ModelConfig) -> dict[str, int]:
    """Return the length that each letter of a pattern stands for."""
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
        "Q": model.num_heads // model.kv_heads + 2,
        "H": model.head_size,
        "R": model.head_size // 2,
        "F": model.ffn_size,
        "X": model.expert_size,
        "Y": model.shared_ffn_size,
        "A": 2 if model.gated else 1,
        "E": model.experts,
        "B": model.relative_buckets,
    }


def rearrange(x: np.ndarray, pattern: str, sizes: Dims) -> np.ndarray:
    """Return an array as the right side of a pattern says, which lies as the left side says.

    Raises:
        ValueError: the shape of the array is not that of the left side.
    """
    left, right = _sides(pattern)
    if x.shape != _shape(left, sizes):
        raise ValueError(f"{pattern}: the array is {x.shape}, expected {_shape(left, sizes)}")
    letters = [letter for group in left for letter in group]
    order = [letters.index(letter) for group in right for letter in group]
    return x.reshape(_shape([[letter] for letter in letters], sizes)).transpose(order).reshape(_shape(right, sizes))


def join(parts: Sequence[np.ndarray], patterns: Sequence[str], sizes: Dims) -> np.ndarray:
    """Make one slice of our parameter of tensors, which lie side by side where the last pattern has its 1."""
    laid_out = [rearrange(part, pattern, sizes) for part, pattern in zip(parts, patterns, strict=True)]
    return np.concatenate(laid_out, _beside(patterns)) if len(laid_out) > 1 else laid_out[0]


def split(whole: np.ndarray, patterns: Sequence[str], sizes: Dims) -> list[np.ndarray]:
    """Make tensors of one slice of our parameter, which is the inverse of `join`."""
    axis = _beside(patterns)
    lengths = [ours_shape(pattern, sizes)[axis] for pattern in patterns] if len(patterns) > 1 else []
    parts = np.split(whole, list(accumulate(lengths))[:-1], axis) if lengths else [whole]
    return [rearrange(part, _reverse(pattern), sizes) for part, pattern in zip(parts, patterns, strict=True)]


def theirs_shape(pattern: str, sizes: Dims) -> tuple[int, ...]:
    """Return the shape of the tensor on the left of a pattern."""
    return _shape(_sides(pattern)[0], sizes)


def ours_shape(pattern: str, sizes: Dims) -> tuple[int, ...]:
    """Return the shape of the slice on the right of a pattern."""
    return _shape(_sides(pattern)[1], sizes)


def joined_shape(patterns: Sequence[str], sizes: Dims) -> tuple[int, ...]:
    """Return the shape of the slice that `join` makes."""
    shapes = [list(ours_shape(pattern, sizes)) for pattern in patterns]
    if len(shapes) > 1:
        axis = _beside(patterns)
        shapes[0][axis] = sum(shape[axis] for shape in shapes)
    return tuple(shapes[0])


def _beside(patterns: Sequence[str]) -> int:
    """Return the dimension along which several parts lie side by side."""
    return _sides(patterns[-1])[1].index([]) if len(patterns) > 1 else 0


def _reverse(pattern: str) -> str:
    left, right = pattern.split("->")
    return f"{right} -> {left}"


def _sides(pattern: str) -> tuple[list[list[str]], list[list[str]]]:
    left, right = pattern.split("->")
    return _groups(left), _groups(right)


def _groups(side: str) -> list[list[str]]:
    """Split one side into its dimensions: `(K 3 H) D 1` becomes [[K, 3, H], [D], []]."""
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
