"""Filters keep the right tokens in the draw, and each token is drawn as often as it should be."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megajax.config.base import InputError
from megajax.inference.sampling import Sampling, choose_token, keep_top_k, keep_top_p

PROBABILITIES = jnp.array([1 / 8, 1 / 2, 1 / 8, 1 / 4])
LOGITS = jnp.log(PROBABILITIES)


def draws(sampling, count=4000):
    """Share of each token among many draws."""
    keys = jax.random.split(jax.random.key(0), count)
    tokens = jax.jit(jax.vmap(lambda key: choose_token(LOGITS, key, sampling)))(keys)
    assert tokens.dtype == jnp.int32
    return np.bincount(tokens, minlength=4) / count


@pytest.mark.parametrize(("p", "kept"), [(0, 1), (0.5, 1), (0.51, 2), (0.75, 2), (0.76, 3), (1, 4)])
def test_smallest_set_of_probability_p(p, kept):
    """Probabilities 1/2, 1/4, 1/8, 1/8."""
    filtered = keep_top_p(LOGITS, p)
    order = [1, 3, 0, 2]
    np.testing.assert_array_equal(filtered[jnp.array(order[:kept])], LOGITS[jnp.array(order[:kept])])
    assert np.isneginf(filtered).sum() == 4 - kept


@settings(deadline=None, max_examples=50)
@given(st.floats(0, 1), st.integers(0, 2**16))
def test_kept_set_is_the_smallest(p, seed):
    """Without its least likely token it would fall short of p; no token left out is likelier than one kept."""
    probabilities = np.random.default_rng(seed).dirichlet(np.ones(12))
    kept = np.isfinite(keep_top_p(jnp.log(jnp.float32(probabilities)), p))
    assert kept[probabilities.argmax()]
    assert probabilities[kept].sum() > p - 1e-6
    assert kept.sum() == 1 or probabilities[kept].sum() - probabilities[kept].min() < p + 1e-6
    assert probabilities[kept].min() >= probabilities[~kept].max(initial=0)


@pytest.mark.parametrize(("k", "kept"), [(0, 4), (1, 1), (2, 2), (4, 4), (100, 4)])
def test_k_largest(k, kept):
    """0 switches the filter off, more than there are keep all."""
    assert np.isfinite(keep_top_k(LOGITS, k)).sum() == kept


@pytest.mark.parametrize(
    "bad",
    [{"top_p": -0.1}, {"top_p": 1.1}, {"top_p": float("nan")}, {"top_k": -1}, {"temperature": -1.0},
     {"temperature": float("nan")}],
)  # fmt: skip
def test_values_without_meaning(bad):
    with pytest.raises(InputError, match=f"{next(iter(bad))} is .*: expected"):
        Sampling(**bad)


def test_temperature_zero_is_greedy():
    np.testing.assert_array_equal(draws(Sampling(temperature=0.0)), [0, 1, 0, 0])


@pytest.mark.parametrize(
    ("sampling", "shares"),
    [
        pytest.param(Sampling(), [1 / 8, 1 / 2, 1 / 8, 1 / 4], id="plain"),
        pytest.param(Sampling(temperature=0.5), [1 / 22, 16 / 22, 1 / 22, 4 / 22], id="squares"),
        pytest.param(Sampling(top_k=2), [0, 2 / 3, 0, 1 / 3], id="two-likeliest"),
        pytest.param(Sampling(temperature=0.5, top_p=0.7), [0, 1, 0, 0], id="p-counts-after-temperature"),
        pytest.param(Sampling(top_k=2, top_p=0.6), [0, 1, 0, 0], id="p-counts-after-k"),
    ],
)
def test_draws_follow_the_distribution(sampling, shares):
    np.testing.assert_allclose(draws(sampling), shares, atol=4 * 0.5 / 4000**0.5)
