"""Dropout masks depend on (seed, step, sample, layer, site) and on nothing else.

Shapes: B batch, S sequence, D embed.
"""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from megajax.models.block import run_blocks
from megajax.models.dropout import SITES, dropout, layer_keys, sample_keys
from megajax.models.gpt import Gpt
from megajax.models.layout import Layout
from tests.models.tiny import GPT, batch_of, filled, forward, random_model, random_tokens

DROPPING = replace(GPT, hidden_dropout=0.5, attention_dropout=0.5)


def masks(step, samples, layer, site, size=256):
    """What half a dropout keeps of each sample, [B, size] bool."""
    keys = layer_keys(sample_keys(7, jnp.int32(step), jnp.array(samples, jnp.uint32)), layer)
    ones = jnp.ones((len(samples), size))
    return np.array(dropout(ones, 0.5, keys, site, Layout(), ("batch", None))) != 0


def test_all_masks_differ():
    """Between rows, layers, sites and steps two masks agree on about half of their elements."""
    drawn = [
        masks(step, samples=[0, 1, 2], layer=layer, site=site)
        for step in (0, 1)
        for layer in (0, 1, 2)
        for site in SITES
    ]
    signs = np.concatenate(drawn) * 2.0 - 1
    assert len(signs) == 18 * len(SITES)
    agreement = signs @ signs.T / signs.shape[1] - np.eye(len(signs))
    assert np.abs(agreement).max() < 0.4  # 6 standard deviations of 256 coin throws


def test_masks_do_not_depend_on_the_batch():
    first, second = masks(3, [5, 9], 1, "attention"), masks(3, [9, 2**32 - 1, 5], 1, "attention")
    np.testing.assert_array_equal(first, second[[2, 0]])


@pytest.mark.parametrize("rate", [0.1, 0.25])
def test_mean_is_kept(rate):
    x = jnp.full((4, 50_000), 3.0)
    keys = sample_keys(0, jnp.int32(0), jnp.arange(4))
    y = np.array(dropout(x, rate, keys, "mlp_output", Layout(), ("batch", None)))
    np.testing.assert_allclose(np.unique(y), [0, 3 / (1 - rate)], rtol=1e-6)
    assert abs((y == 0).mean() - rate) < 0.004
    assert abs(y.mean() - 3) < 0.02


def test_off_without_keys_or_rate():
    x = jnp.ones((2, 8), jnp.bfloat16)
    keys = sample_keys(0, jnp.int32(0), jnp.arange(2))
    assert dropout(x, 0.5, None, "attention", Layout(), ("batch", None)) is x
    assert dropout(x, 0.0, keys, "attention", Layout(), ("batch", None)) is x
    assert dropout(x, 0.5, keys, "attention", Layout(), ("batch", None)).dtype == jnp.bfloat16


def test_every_site_of_every_layer_draws_its_own_mask():
    """A model that adds 1 and 10 in layer 1, 100 and 1000 in layer 2 to an embedding of 10,000 writes down its masks.

    Two pipeline stages of one layer each draw what the whole model draws.
    """
    model = filled(lambda key: Gpt(key, replace(DROPPING, attention_dropout=0.0)), np.zeros)
    model.word_embedding[...] += 10_000
    model.blocks.attention.out_bias[...] += jnp.array([[1.0], [100.0]])
    model.blocks.mlp.fc2_bias[...] += jnp.array([[10.0], [1000.0]])
    batch = batch_of(np.zeros((2, 16), np.int32))

    @jax.jit
    def run(model, keys):
        context = model.context(batch, Layout(), keys)
        x = model.embed(batch, context)
        stages = [jax.tree.map(lambda w, i=i: w[i : i + 1], model.blocks) for i in range(2)]
        middle, _ = run_blocks(stages[0], x, context)
        whole, _ = run_blocks(model.blocks, x, context)
        return whole, run_blocks(stages[1], middle, context, first_layer=1)[0]

    whole, staged = run(model, sample_keys(7, jnp.int32(0), jnp.arange(2)))

    np.testing.assert_array_equal(whole, staged)
    digits = np.int64(whole / 2)[..., None] // 10 ** np.arange(5) % 10  # kept elements are doubled
    assert set(np.unique(digits).tolist()) == {0, 1}
    signs = np.concatenate(np.moveaxis(digits, -1, 1)).reshape(10, -1) * 2.0 - 1  # 2 samples x 5 sites
    agreement = signs @ signs.T / signs.shape[1] - np.eye(10)
    assert np.abs(agreement).max() < 0.4


def test_a_sample_sees_the_same_model_in_any_batch():
    """Same (seed, step, sample): same logits, beside whichever other sample. Another step or sample: others."""
    model = random_model(DROPPING)
    row, other = random_tokens(2, 8)
    keys = partial(sample_keys, 7)

    here = forward(model, batch_of(np.stack([row, other])), keys(jnp.int32(1), jnp.array([8, 3])))
    there = forward(model, batch_of(np.stack([other, row])), keys(jnp.int32(1), jnp.array([5, 8])))
    twice = forward(model, batch_of(np.stack([row, row])), keys(jnp.int32(2), jnp.array([8, 9])))

    np.testing.assert_allclose(here[0], there[1], rtol=1e-5, atol=1e-5)
    assert np.abs(here[1] - there[0]).max() > 0.1
    assert np.abs(here[0] - twice[0]).max() > 0.1
    assert np.abs(twice[0] - twice[1]).max() > 0.1
