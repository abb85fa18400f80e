"""LAMBADA (1606.06031) as Megatron-LM defines the task: predict the last word of a passage.

A target counts as predicted if each of its tokens is the likeliest one after the tokens before it. The usual target is
the last token of a passage; the strict one is its last word, of any number of tokens.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from megajax.config import InputError
from megajax.corpus.readers import read_documents
from megajax.inference.tasks.scoring import Scorer, Window
from megajax.inference.trained import TrainedModel


class Lambada(NamedTuple):
    """The results of the task."""

    correct: int
    examples: int

    @property
    def accuracy(self) -> float:
        """Return the share of passages whose target is predicted."""
        return self.correct / self.examples

    def line(self) -> str:
        """Return the results as a line in Megatron-LM's form."""
        return (
            f"validation results on LAMBADA | number correct: {self.correct:.4E} | "
            f"total examples: {self.examples:.4E} | avg accuracy: {self.accuracy:.4E}"
        )


def evaluate_lambada(trained: TrainedModel, path: Path, scorer: Scorer, strict: bool = False) -> Lambada:
    """Score a jsonl file of passages under the key "text".

    Raises:
        InputError: the file cannot be read, or holds no passage or a passage of a single word.
    """
    examples = list(passages(trained, read_documents([path]), strict))
    if not examples:
        raise InputError(f"{path}: holds no passage")
    return Lambada(sum(bool(scores.greedy.all()) for scores in scorer(examples)), len(examples))


def passages(trained: TrainedModel, texts: Iterable[str], strict: bool) -> Iterable[Window]:
    """Return context and target of every passage.

    A context that is too long for the model loses its beginning.

    With `strict`, context and " " + last word are tokenised separately.
    """
    longest = trained.config.data.seq_length + 1
    for number, text in enumerate(texts, 1):
        if strict and (words := text.split()):
            context = text[: text.rindex(words[-1])].strip()
            before, target = trained.encode(context), trained.tokenizer.encode(f" {words[-1]}")
        else:
            ids = trained.encode(text)
            before, target = ids[:-1], ids[-1:]
        if not before or not target or len(target) >= longest:
            raise InputError(f"passage {number} {text[:40]!r}: {len(target)} tokens to predict from {len(before)}")
        yield Window([*before, *target][-longest:], len(target))
