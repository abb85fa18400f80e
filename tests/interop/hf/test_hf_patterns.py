"""Patterns are layouts as text that reads both ways."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megajax.config import ModelConfig
from megajax.interop.hf.decoders import GPT2_TABLE as GPT2
from megajax.interop.hf.decoders import LLAMA_TABLE as LLAMA
from megajax.interop.hf.families import FAMILIES
from megajax.interop.patterns import dims, interleaved, join, joined_shape, rearrange, split, theirs_shape
from tests.interop.hf.made import MODELS

SIZES = {"D": 2, "K": 1, "G": 1, "H": 8, "R": 4}


def test_a_pattern_is_a_reshape_and_a_transpose() -> None:
    """Two heads of width 3 in a matrix [out, in] are [in, heads, width] here."""
    matrix = np.arange(12).reshape(6, 2)
    heads = rearrange(matrix, "(K H) D -> D K H", {"K": 2, "H": 3, "D": 2})
    np.testing.assert_array_equal(heads, [[[0, 2, 4], [6, 8, 10]], [[1, 3, 5], [7, 9, 11]]])


def test_another_shape_is_refused() -> None:
    with pytest.raises(ValueError, match=r"the array is \(2, 6\), expected \(6, 2\)"):
        rearrange(np.zeros((2, 6)), "(K H) D -> D K H", {"K": 2, "H": 3, "D": 2})


def test_parts_lie_side_by_side_where_the_last_has_its_1() -> None:
    """Gate and up projection, [F, D] each, are [D, 2, F]."""
    gate, up = np.array([[1, 2], [3, 4], [5, 6]]), np.array([[7, 8], [9, 10], [11, 12]])
    whole = join([gate, up], ["F D -> D 1 F"] * 2, {"F": 3, "D": 2})
    np.testing.assert_array_equal(whole, [[[1, 3, 5], [7, 9, 11]], [[2, 4, 6], [8, 10, 12]]])


def test_interleaved_rotary_rows() -> None:
    """At head dim 8 rows 0, 2, 4, 6, 1, 3, 5, 7 of an interleaved head are the half-split one, and back."""
    rows = list(interleaved(LLAMA)["blocks.attention.qkv"].values())
    numbers = np.repeat(np.arange(8)[:, None], 2, axis=1)
    q, k, v = join([numbers] * 3, rows, SIZES)[0, 0]
    assert q.tolist() == k.tolist() == [0, 2, 4, 6, 1, 3, 5, 7]
    assert v.tolist() == [0, 1, 2, 3, 4, 5, 6, 7]
    back = split(np.broadcast_to(np.arange(8), (2, 1, 3, 8)), rows, SIZES)
    assert [part[:, 0].tolist() for part in back] == [[0, 4, 1, 5, 2, 6, 3, 7]] * 2 + [[0, 1, 2, 3, 4, 5, 6, 7]]


def test_gpt2_keeps_matrices_as_they_are() -> None:
    """The square output matrix by value, 8 x 8 and untransposed; q, k and v by head."""
    sizes = dims(ModelConfig(num_layers=1, hidden_size=8, num_heads=2, max_positions=4, vocab_size=5))
    square = np.arange(64).reshape(8, 8)
    (pattern,) = GPT2["blocks.attention.out"].values()
    np.testing.assert_array_equal(rearrange(square, pattern, sizes).reshape(8, 8), square)
    fused = np.arange(8 * 24).reshape(8, 24)
    (pattern,) = GPT2["blocks.attention.qkv"].values()
    heads = rearrange(fused, pattern, sizes)  # [D, K, 3, H]
    np.testing.assert_array_equal(heads[0, 1], [[4, 5, 6, 7], [12, 13, 14, 15], [20, 21, 22, 23]])


@pytest.mark.parametrize("model_type", FAMILIES)
@settings(max_examples=20)
@given(sizes=st.fixed_dictionaries(dict.fromkeys("VPTDKGHFXYEB", st.integers(1, 4))), seed=st.integers(0, 99))
def test_every_row_is_exactly_invertible(model_type: str, sizes: dict[str, int], seed: int) -> None:
    """Their tensors -> ours -> theirs, and ours -> theirs -> ours."""
    sizes = sizes | {"H": 2 * sizes["H"], "R": sizes["H"], "N": sizes["K"] * sizes["G"], "C": sizes["D"]}
    if model_type in ("gpt2", "bloom"):  # q, k and v in one tensor: no grouping
        sizes |= {"G": 1, "N": sizes["K"]}
    rng = np.random.default_rng(seed)
    table = FAMILIES[model_type].table(MODELS[model_type])
    for ours, row in {**table, **{f"interleaved {name}": row for name, row in interleaved(table).items()}}.items():
        patterns = list(row.values())
        theirs = [rng.standard_normal(theirs_shape(pattern, sizes)) for pattern in patterns]
        whole = join(theirs, patterns, sizes)
        assert whole.shape == joined_shape(patterns, sizes), ours
        for part, back in zip(theirs, split(whole, patterns, sizes), strict=True):
            np.testing.assert_array_equal(back, part, err_msg=ours)
        np.testing.assert_array_equal(join(split(whole, patterns, sizes), patterns, sizes), whole, err_msg=ours)
