"""WikiText-103 as Megatron-LM defines the task (tasks/zeroshot_gpt): perplexity in words of the original file.

The file is one string: its tokenisation is undone, it becomes one sequence of ids, and overlapping windows score it.
Papers give perplexities per word of the original file; the adjusted perplexity scales the loss to words, by the number
of ids per word. Words are the pieces between single spaces, line ends included: the test file of WikiText-103 has
245,566.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from megajax.config import InputError
from megajax.inference.tasks.scoring import Scorer, check_stride, windows
from megajax.inference.trained import TrainedModel

HIGHEST_LOSS = 20.0
"""Largest loss for which a perplexity is given; larger losses count as this one."""


class WikiText(NamedTuple):
    """The results of the task."""

    loss: float
    """Mean loss in nats of all ids but the first."""
    perplexity: float
    adjusted_perplexity: float
    token_ratio: float
    """Number of ids per word of the original."""
    tokens: int
    """Number of ids that were scored."""

    def line(self) -> str:
        """Return the results as a line in Megatron-LM's form."""
        return (
            f"validation results on WIKITEXT103 | avg loss: {self.loss:.4E} | ppl: {self.perplexity:.4E} | "
            f"adjusted ppl: {self.adjusted_perplexity:.4E} | token ratio: {self.token_ratio} |"
        )


def evaluate_wikitext(trained: TrainedModel, path: Path, scorer: Scorer, overlapping_eval: int | None) -> WikiText:
    """Score a WikiText file.

    Args:
        trained: model and tokenizer.
        path: file of the tokenised text (wiki.test.tokens).
        scorer: scorer of the same model.
        overlapping_eval: stride of the windows; None = no overlap. Megatron-LM's default is 32.

    Raises:
        InputError: the file cannot be read or is too short, or the stride fits no window.
    """
    length = trained.config.data.seq_length
    stride = check_stride(overlapping_eval, length)
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{path}: cannot be read ({error})") from None
    words = len(text.strip().split(" "))
    ids = trained.encode(detokenized(text))
    if len(ids) < 2 or words < 2:
        raise InputError(f"{path}: holds {words} words and {len(ids)} tokens, which leave nothing to predict")
    total = sum(scores.loss for scores in scorer(list(windows(ids, length, stride))))
    loss, ratio = total / (len(ids) - 1), (len(ids) - 1) / (words - 1)
    return WikiText(loss, perplexity(loss), perplexity(loss * ratio), ratio, len(ids) - 1)


def perplexity(loss: float) -> float:
    """Return exp(min(20, loss)), which is capped as in Megatron-LM."""
    return math.exp(min(HIGHEST_LOSS, loss))


def detokenized(text: str) -> str:
    """Return the text of a WikiText file without its tokenisation, as far as that can be undone.

    The steps and their order are those of Megatron-LM's task; later ones see the output of earlier ones.
    """
    for step in STEPS:
        text = step(text)
    return text


def _replace(old: str, new: str) -> Callable[[str], str]:
    return lambda text: text.replace(old, new)


def _hug(left: str, right: str) -> Callable[[str], str]:
    """Return a function that removes spaces between a pair of brackets or quotes and the text inside them."""
    inside = re.compile(rf"{re.escape(left)}\s*([^{re.escape(right)}]*?)\s*{re.escape(right)}")
    return lambda text: inside.sub(lambda match: f"{left}{match[1]}{right}", text)


STEPS: Sequence[Callable[[str], str]] = (
    _replace("s '", "s'"),
    *(_replace(f" @{sign}@ ", sign) for sign in "-,."),  # between digits, or between parts of a word
    *(_replace(f" {sign} ", f"{sign} ") for sign in ":;.!?,"),
    *(_hug(left, right) for left, right in ("()", "[]", "{}", '""', "''")),
    *(_replace(" ".join("=" * depth), "=" * depth) for depth in (4, 3, 2)),  # headings
    _replace(" ° ", "°"),
    _replace(" \n", "\n"),
    _replace("\n ", "\n"),
    _replace(" N ", " 1 "),  # the Penn Treebank's sign for any number
    _replace(" 's", "'s"),
)
