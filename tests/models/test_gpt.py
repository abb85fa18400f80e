"""The whole model with every kind of switch, compared with float64 loops: masks, the loss and its gradient.

Shapes: B batch, S sequence, V vocabulary without padding.
"""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from megajax.config.data import DataConfig
from megajax.data.gpt import make_batch
from megajax.models.gpt import Gpt
from megajax.models.layout import Layout
from megajax.models.parameters import cast
from tests.models import reference
from tests.models.tiny import GEMMA, GPT, LLAMA, batch_of, forward, random_model, random_tokens

SWITCHES = {
    "gpt": GPT,
    "llama": LLAMA,
    "qk-norm": replace(LLAMA, qk_norm=True, norm="layernorm", bias=True, rope_fraction=0.5, rope_base=500.0),
    "qkv-bias": replace(LLAMA, qkv_bias=True, head_dim=6, num_kv_heads=1, norm_eps=0.1),
    "llama-3.1": replace(LLAMA, head_dim=8, rope_scaling_factor=8.0, rope_original_positions=24),
    "mistral": replace(LLAMA, window=3),
    "bloom": replace(GPT, positions="alibi", embedding_norm=True),
    "alibi-6": replace(GPT, positions="alibi", num_heads=6, hidden_size=12),
    "exact": replace(GPT, activation="gelu_exact", attention_scale=1.0),
    "relu": replace(GPT, activation="relu"),
    "geglu": replace(LLAMA, activation="geglu"),
    "gemma": replace(GEMMA, num_layers=5),
    "gemma-without-caps": replace(
        GEMMA,
        num_layers=3,
        attention_softcap=None,
        logit_softcap=None,
        qk_norm=True,
        norm="layernorm",
        layer_pattern=("global", "local", "local", "local"),
    ),
    "plus-one": replace(GPT, norm_plus_one=True, attention_softcap=3.0, branch_norm=True),
    "no-positions": replace(GPT, positions="none", norm="rmsnorm", qkv_bias=False, qk_norm=True, num_kv_heads=2),
}


@pytest.mark.parametrize("name", SWITCHES)
def test_logits_match_loops(name):
    model, tokens = random_model(SWITCHES[name]), random_tokens(2, 7)
    logits = forward(model, batch_of(tokens))
    assert logits.shape == (2, 7, 50)
    np.testing.assert_allclose(logits, reference.logits(model, tokens), rtol=2e-5, atol=2e-5)


def test_tokens_do_not_see_the_future(config):
    """Row t has another token t than the row before all others: no logit before t changes, those from t on do."""
    model, S = random_model(config), 8
    original = random_tokens(1, S)
    changed = np.where(np.eye(S, dtype=bool), (original + 1) % config.vocab_size, original)

    logits = np.array(forward(model, batch_of(np.concatenate([original, changed]))))

    for t, row in enumerate(logits[1:]):
        np.testing.assert_array_equal(row[:t], logits[0, :t])
        assert (np.abs(row - logits[0]).max(axis=-1)[t:] > 1e-4).all()


def test_documents_of_a_sample_are_strangers(config):
    """Cut out of its sample, the second document has the same logits, in its own positions and unseen by the first."""
    E = 49
    model, second = random_model(config), [3, 1, 4, E]
    data = DataConfig(seq_length=8, reset_positions=True, reset_attention=True)
    samples = [np.array(sample) for sample in ([7, 8, 9, E, *second], [5, 5, 5, E, *second], second)]
    batch = make_batch(samples, np.arange(3), data, E)

    logits = np.array(forward(model, {name: batch[name] for name in ("tokens", "positions", "segment_ids")}))

    np.testing.assert_array_equal(logits[0, 4:8], logits[1, 4:8])
    np.testing.assert_allclose(logits[0, 4:8], logits[2, :4], rtol=1e-5, atol=1e-5)
    expected = reference.logits(model, batch["tokens"], batch["positions"], batch["segment_ids"])
    np.testing.assert_allclose(logits, expected, rtol=2e-5, atol=2e-5)


@pytest.mark.slow
def test_loss_and_gradient(config):
    """Of every weight, with all activations recomputed, as if nothing were and all logits had been made."""
    model = random_model(config)
    tokens, labels = random_tokens(2, 6), random_tokens(2, 6, seed=1)
    weights = np.float32(np.random.default_rng(0).uniform(size=(2, 6)) * [1, 1, 1, 1, 0, 0])
    batch = batch_of(tokens, labels=labels, weights=weights)

    def fused(model):
        return model.losses(batch, model.context(batch, Layout(), keys=None), remat=jax.checkpoint)["lm loss"]

    def naive(model):
        log_probabilities = jax.nn.log_softmax(forward(model, batch_of(tokens)))
        return -jnp.sum(weights * jnp.take_along_axis(log_probabilities, labels[..., None], axis=-1)[..., 0])

    loss, gradient = jax.jit(jax.value_and_grad(fused))(model)

    by_hand = reference.logits(model, tokens)
    target = np.take_along_axis(by_hand, labels[..., None], axis=-1)[..., 0]
    np.testing.assert_allclose(loss, np.sum(weights * (np.log(np.exp(by_hand).sum(axis=-1)) - target)), rtol=1e-5)
    expected = jax.jit(jax.grad(naive))(model)
    for got, wanted in zip(jax.tree.leaves(gradient), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(got, wanted, rtol=1e-4, atol=1e-5 * np.abs(wanted).max())
    assert not gradient.output_matrix[config.vocab_size :].any(), "padding"


def test_bf16_model_is_close_to_fp32(config):
    """The residual stream is bf16, logits and loss are fp32; weights of the usual size."""
    model = jax.tree.map(lambda w: 0.2 * w, random_model(config))
    tokens = random_tokens(2, 6)
    half = cast(model, jnp.bfloat16)
    batch = batch_of(tokens, labels=tokens, weights=np.ones((2, 6), np.float32))

    hidden = jax.eval_shape(lambda m: m.hidden(batch, m.context(batch, Layout(), None)), half)
    loss = jax.eval_shape(lambda m: m.losses(batch, m.context(batch, Layout(), None))["lm loss"], half)
    logits = forward(half, batch_of(tokens))

    assert (hidden.dtype, logits.dtype, loss.dtype) == (jnp.bfloat16, jnp.float32, jnp.float32)
    exact = forward(model, batch_of(tokens))
    assert np.abs(logits - exact).max() < 0.03 * np.abs(exact).max()


def test_no_weights_without_use():
    """A tied model has no head and a rotary one no position table."""
    tied, untied = (jax.eval_shape(lambda c=c: Gpt(jax.random.key(0), c)) for c in (GPT, replace(GPT, tied_head=False)))
    assert not hasattr(tied, "head")
    assert untied.head.shape == untied.word_embedding.shape == (128, 16)
    assert not hasattr(jax.eval_shape(lambda: Gpt(jax.random.key(0), LLAMA)), "position_embedding")
