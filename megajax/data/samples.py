"""Registry of the kinds of samples on which a model can be trained, one entry each.

To add one, write its dataset, enter it in `KINDS`, and name it at `DataConfig.kind` and in `SAMPLE_KINDS` beside the
model's families. The arrays of its batches are those that the model family expects (`models.model.Model.arrays`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, NamedTuple

from megajax.config.data import DataConfig
from megajax.data.bert import BertDataset
from megajax.data.dataset import Order
from megajax.data.gpt import GPTDataset
from megajax.data.indexed import Selection
from megajax.data.instruction import InstructionDataset
from megajax.data.t5 import T5Dataset
from megajax.data.tokenizers import Tokenizer


class Recipe(NamedTuple):
    """The settings by which samples are made of documents."""

    config: DataConfig
    tokenizer: Tokenizer
    """Tokenizer with the special ids; ids outside its vocabulary are refused."""
    kind: str = "gpt"
    """Name of an entry of `KINDS`."""
    pair_task: bool = False
    """Whether bert's samples have two parts, whose order is to be found."""


class Kind(NamedTuple):
    """All that is special about one kind of samples."""

    dataset: Callable[[Selection[Any], Recipe], Order]
    """Class or function that makes the samples of some documents."""
    made_of: Literal["document", "sentence", "conversation"] = "document"
    """Form of the text in token files (`corpus.prepare`).

    A sequence is a whole document, or a sentence of one, or a turn of a conversation.
    """

    @property
    def joined(self) -> bool:
        """Tell whether documents are joined and cut anywhere; otherwise samples are made of whole documents."""
        return self.made_of == "document"


KINDS = {
    "gpt": Kind(lambda selection, of: GPTDataset(selection, of.config, of.tokenizer)),
    "bert": Kind(lambda selection, of: BertDataset(selection, of.config, of.tokenizer, of.pair_task), "sentence"),
    "t5": Kind(lambda selection, of: T5Dataset(selection, of.config, of.tokenizer), "sentence"),
    "instruction": Kind(lambda selection, of: InstructionDataset(selection, of.config, of.tokenizer), "conversation"),
}
