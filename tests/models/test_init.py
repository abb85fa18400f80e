"""Initial weights have the right spread, and depend on (key, layer) alone, whatever the padding or the depth."""

from dataclasses import replace
from functools import cache

import jax
import numpy as np
import pytest

from megajax.config.model import ModelConfig
from megajax.models.gpt import Gpt
from megajax.models.layout import Layout
from megajax.models.parameters import named_leaves
from tests.models.tiny import batch_of, random_tokens

CONFIG = ModelConfig(
    num_layers=2, hidden_size=64, num_heads=4, max_positions=64, vocab_size=100, activation="swiglu", tied_head=False,
    qk_norm=True,
)  # fmt: skip
OUTPUT_LAYERS = ("blocks.attention.out", "blocks.mlp.fc2")


@cache
def drawn(seed: int = 0, **changes) -> Gpt:
    config = replace(CONFIG, **changes)
    return jax.jit(lambda key: Gpt(key, config))(jax.random.key(seed))


def weights(seed: int = 0, **changes) -> dict[str, np.ndarray]:
    return {name: np.array(param[...]) for name, param in named_leaves(drawn(seed, **changes))}


def test_spread():
    """0.02, and 0.02 / sqrt(2 x 2 layers) = 0.01 where a branch joins the residual stream; biases 0, gains 1."""
    for name, param in named_leaves(drawn()):
        values = np.array(param[...])
        if name in ("word_embedding", "head"):
            values = values[:100]
        if param.role in ("matrix", "embedding"):
            std = 0.01 if name in OUTPUT_LAYERS else 0.02
            assert abs(values.std() / std - 1) < 4 / (2 * values.size) ** 0.5, name
            assert abs(values.mean() / std) < 4 / values.size**0.5, name
        else:
            np.testing.assert_array_equal(values, float(name.endswith("scale")), err_msg=name)


@pytest.mark.slow
def test_padding_is_zero_and_changes_nothing():
    """Rows 100 to 127 or 255 are zero; all others, and the loss, are bit-equal under both multiples."""
    small, large = weights(), weights(vocab_multiple=256)
    assert (len(small["head"]), len(large["head"])) == (128, 256)
    for name, value in small.items():
        if name in ("word_embedding", "head"):
            assert not value[100:].any()
            assert not large[name][100:].any()
            value, large[name] = value[:100], large[name][:100]  # noqa: PLW2901
        np.testing.assert_array_equal(large[name], value, err_msg=name)

    batch = batch_of(random_tokens(2, 8), labels=random_tokens(2, 8, seed=1), weights=np.ones((2, 8), np.float32))
    loss = jax.jit(lambda m: m.losses(batch, m.context(batch, Layout(), keys=None))["lm loss"])
    np.testing.assert_allclose(loss(drawn(vocab_multiple=256)), loss(drawn()), rtol=1e-6)


def test_a_layer_depends_on_key_and_number_only():
    """The first 2 of 8 layers are those of the shallow model; output layers differ by sqrt(8 / 2) = 2 exactly."""
    shallow, deep = weights(), weights(num_layers=8)
    for name, value in shallow.items():
        factor = 2 if name in OUTPUT_LAYERS else 1
        kept = deep[name][:2] if name.startswith("blocks.") else deep[name]
        np.testing.assert_array_equal(factor * kept, value, err_msg=name)
    for layer, other in [(0, 1), (1, 7)]:
        assert abs(np.corrcoef(*(deep["blocks.mlp.fc1"][i].ravel() for i in (layer, other)))[0, 1]) < 0.05


def test_weights_depend_on_the_key():
    first, second = weights(), weights(seed=1)
    for name in ("word_embedding", "position_embedding", "head", "blocks.attention.qkv", *OUTPUT_LAYERS):
        assert np.abs(first[name] - second[name]).max() > 0.02, name
    assert np.abs(first["word_embedding"] - first["head"]).max() > 0.02
