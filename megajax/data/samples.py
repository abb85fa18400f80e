"""The kinds of samples that a model can be trained on, one entry each: the registry that data and corpus go by.

To add one, write its dataset, enter it in `KINDS`, and name it at `DataConfig.kind` and in `config.checks`. The arrays
of its batches are those that the model family wants (`models.model.Model.arrays`).
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
    """It gives the special ids; ids outside its vocabulary are refused."""
    kind: str = "gpt"
    """Name of an entry of `KINDS`."""
    pair_task: bool = False
    """Samples of bert are two parts, whose order is to be found out."""


class Kind(NamedTuple):
    """All that is special about one kind of samples."""

    dataset: Callable[[Selection[Any], Recipe], Order]
    """Make the samples of some documents."""
    made_of: Literal["document", "sentence", "conversation"] = "document"
    """Form of the text in token files (`corpus.prepare`): a sequence is a whole document, or a document's sentences
    or a conversation's turns are sequences of their own."""

    @property
    def joined(self) -> bool:
        """Tell whether documents are joined end to end and cut anywhere; other samples are made of whole documents."""
        return self.made_of == "document"


KINDS = {
    "gpt": Kind(lambda selection, of: GPTDataset(selection, of.config, of.tokenizer)),
    "bert": Kind(lambda selection, of: BertDataset(selection, of.config, of.tokenizer, of.pair_task), "sentence"),
    "t5": Kind(lambda selection, of: T5Dataset(selection, of.config, of.tokenizer), "sentence"),
    "instruction": Kind(lambda selection, of: InstructionDataset(selection, of.config, of.tokenizer), "conversation"),
}
