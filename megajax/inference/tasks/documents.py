"""Perplexity of the documents of a jsonl file, each scored separately."""

from __future__ import annotations

import math
from pathlib import Path
from typing import NamedTuple

from megajax.config import InputError
from megajax.corpus.readers import read_documents
from megajax.inference.tasks.scoring import Scorer, Window, check_stride, windows
from megajax.inference.trained import TrainedModel


class Documents(NamedTuple):
    """The results of the evaluation on documents."""

    loss: float
    """Mean loss in nats over all predicted tokens, which exclude the first token of each document."""
    perplexity: float
    bits_per_byte: float
    """Bits of all predictions divided by the bytes (UTF-8) of the documents, which does not depend on the tokenizer."""
    tokens: int
    """Number of predicted tokens."""
    documents: int

    def line(self) -> str:
        """Return the results as a line like those of the other tasks."""
        return (
            f"results on {self.documents} documents | tokens: {self.tokens} | avg loss: {self.loss:.6f} | "
            f"ppl: {self.perplexity:.4f} | bits per byte: {self.bits_per_byte:.4f}"
        )


def evaluate_documents(
    trained: TrainedModel, path: Path, scorer: Scorer, overlapping_eval: int | None = None
) -> Documents:
    """Score a jsonl file of documents under the key "text".

    Args:
        trained: model and tokenizer.
        path: path of the file.
        scorer: scorer of the same model.
        overlapping_eval: stride of a document's windows; None = no overlap.

    Raises:
        InputError: the file cannot be read or holds nothing to predict, or the stride fits no window.
    """
    length = trained.config.data.seq_length
    stride = check_stride(overlapping_eval, length)
    pieces: list[Window] = []
    documents, size, tokens = 0, 0, 0
    for text in read_documents([path]):
        ids = trained.encode(text)
        if len(ids) < 2:
            continue
        pieces += windows(ids, length, stride)
        documents, size, tokens = documents + 1, size + len(text.encode()), tokens + len(ids) - 1
    if not tokens:
        raise InputError(f"{path}: no document has two tokens, of which one could be predicted")
    total = sum(scores.loss for scores in scorer(pieces))
    loss = total / tokens
    return Documents(loss, math.exp(loss), total / math.log(2) / size, tokens, documents)
