"""Samples other than a GPT's, by the name of their kind."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from megajax.config.data import DataConfig
from megajax.data.bert import BertDataset
from megajax.data.dataset import Order
from megajax.data.indexed import IndexedDataset, Selection
from megajax.data.instruction import InstructionDataset
from megajax.data.t5 import T5Dataset
from megajax.data.tokenizers import Tokenizer


def build_split(  # noqa: PLR0913 - what one kind or another needs
    kind: str,
    indexed: IndexedDataset,
    indices: np.ndarray,
    num_samples: int | None,
    config: DataConfig,
    *,
    pair_task: bool,
    seed: int,
    name: str,
    tokenizer: Tokenizer,
    cache_dir: Path | None,
) -> Order:
    """Make the dataset of one split of one token file.

    Args:
        kind: bert, t5 or instruction.
        indexed: see `Selection`, also for indices, num_samples, seed, name and cache_dir.
        indices: documents.
        num_samples: at least.
        config: what samples are.
        pair_task: bert: samples are two parts.
        seed: of the order.
        name: of the split.
        tokenizer: gives the special ids.
        cache_dir: of the order.
    """
    selection = Selection(indexed, indices, num_samples, seed, name, cache_dir)
    match kind:
        case "bert":
            return BertDataset(selection, config, tokenizer, pair_task)
        case "t5":
            return T5Dataset(selection, config, tokenizer)
        case "instruction":
            return InstructionDataset(selection, config, tokenizer)
    raise AssertionError(kind)
