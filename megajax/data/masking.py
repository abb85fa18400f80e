"""Choice of the tokens of a sample that are predicted: runs of whole words, drawn as in Megatron-LM.

Devlin et al., "BERT" (2019), with the whole words and n-grams of later releases; Joshi et al., "SpanBERT" (2020),
section 3.1, for lengths from a geometric distribution. Shapes: t tokens, w words.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator

import numpy as np

_INVERSE = np.cumsum([6 / 11, 3 / 11, 2 / 11]).tolist()


def inverse_length(rng: np.random.RandomState) -> int:
    """Draw 1 to 3 words in inverse proportion to their number (BERT)."""
    return 1 + bisect_right(_INVERSE, rng.random_sample())


def geometric_length(rng: np.random.RandomState) -> int:
    """Draw a number of words from geometric(0.2), at most 10 (T5)."""
    return min(rng.geometric(0.2), 10)


def whole_words(tokens: np.ndarray, continuations: np.ndarray, special: tuple[int, ...]) -> list[list[int]]:
    """Return the places of each word's tokens.

    Args:
        tokens: ids of the sample [t].
        continuations: whether each id continues the word before it, bool [V].
        special: ids that belong to no word. A continuation after a special id continues the word before that id, as in
            Megatron, or begins a word if there is none.
    """
    words: list[list[int]] = []
    belongs = ~np.isin(tokens, special)
    for place, goes_on in zip(belongs.nonzero()[0].tolist(), continuations[tokens[belongs]].tolist(), strict=True):
        if goes_on and words:
            words[-1].append(place)
        else:
            words.append([place])
    return words


def masking_budget(mask_prob: float, tokens: int, target: int) -> float:
    """Return how many tokens of a sample may be predicted; `target` is the target length of the sample."""
    return min(mask_prob * target, max(1, round(mask_prob * tokens)))


def draw_spans(
    words: list[list[int]],
    budget: float,
    draw_length: Callable[[np.random.RandomState], int],
    rng: np.random.RandomState,
) -> Iterator[list[int]]:
    """Iterate over disjoint runs of words, as lists of places, in the order in which they are drawn.

    The caller may draw from `rng` between runs.

    Args:
        words: places of each word's tokens [w].
        budget: largest number of tokens in all runs together; a run that exceeds it is shortened by words.
        draw_length: function that draws the number of words in a run.
        rng: random generator of this sample.
    """
    order = np.arange(len(words))
    rng.shuffle(order)
    taken: set[int] = set()
    for first in order.tolist():
        if len(taken) + 1 > budget:
            return  # if the budget is not whole, Megatron goes on drawing, but can accept nothing
        for n in range(draw_length(rng), 0, -1):
            run = [place for word in words[first : first + n] for place in word]
            if len(taken) + len(run) <= budget:
                if taken.isdisjoint(run):
                    taken.update(run)
                    yield run
                break
