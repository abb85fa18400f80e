"""Batches for comparisons of layouts have the arrays of each family, and unequal lengths."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from megajax.config import load_config
from megajax.config.model import POSITIONS, SAMPLE_KINDS
from megajax.models.families import FAMILIES, batch_arrays
from megajax.planning.equivalence import RANDOM_BATCHES, random_batch

VERIFY = ["gpt_tiny", "llama_tiny", "bert_tiny", "roberta_tiny", "t5_tiny"]


@pytest.mark.parametrize("name", VERIFY)
def test_every_family_has_its_arrays(name: str) -> None:
    config = load_config(f"verify/{name}.yaml").config
    batch, arrays = random_batch(config, step=3), batch_arrays(config.model, config.data)

    G = config.train.global_batch_size
    shapes = {name: (array.shape, array.dtype) for name, array in batch.items()}
    assert shapes == {name: ((G, *array.shape), array.dtype) for name, array in arrays.items()}
    np.testing.assert_array_equal(batch["sample_ids"], 3 * G + np.arange(G))
    assert len(set(batch["loss_mask"].sum(axis=1))) > 2
    assert (random_batch(config, step=4)["tokens"] != batch["tokens"]).any()


def test_every_family_has_batches() -> None:
    """It also has kinds of samples and positions of its own, which the configuration knows."""
    assert set(FAMILIES) == set(RANDOM_BATCHES) == set(SAMPLE_KINDS) == set(POSITIONS)


def test_pairs_of_texts() -> None:
    """Two parts, then padding; hidden tokens are real ones; the last sample is empty."""
    batch = random_batch(load_config("verify/bert_tiny.yaml").config, step=0)
    parts = 2 * batch["segment_ids"] + batch["token_types"]
    assert (np.diff(parts) >= 0).all()
    assert {0, 1, 2} <= set(parts.flat)
    counts = batch["loss_mask"] == 1
    assert not batch["segment_ids"][counts].any()
    np.testing.assert_array_equal(batch["tokens"] == batch["labels"], ~counts | (batch["labels"] == 99))
    assert batch["pair_labels"][-1] == -1
    assert set(batch["pair_labels"][:-1]) == {0, 1}
    assert not counts[-1].any()


def test_texts_of_encoder_and_decoder_have_lengths_of_their_own() -> None:
    config = load_config("verify/t5_tiny.yaml").config
    batch = random_batch(replace(config, data=replace(config.data, decoder_seq_length=6)), step=0)
    lengths, decoder_lengths = ((batch[f"{side}segment_ids"] == 0).sum(axis=1) for side in ("", "decoder_"))
    assert 8 <= lengths.min() < lengths.max() <= 16
    assert 3 <= decoder_lengths.min() < decoder_lengths.max() <= 6
    np.testing.assert_array_equal(batch["decoder_tokens"][:, 1:], batch["labels"][:, :-1])
