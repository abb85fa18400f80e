"""BERT with three sets of switches, compared with float64 loops: masks, both losses and their gradients.

Shapes: B batch, S sequence, D embed, N heads, V vocabulary without padding.
"""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from megajax.config.model import ModelConfig
from megajax.models.bert import Bert, first_token
from megajax.models.layout import Layout
from megajax.models.parameters import cast, named_leaves
from tests.models.reference import gelu, gelu_exact, norm
from tests.models.tiny import batch_of, filled, random_tokens

B, S, V = 2, 7, 50
MEGATRON = ModelConfig(
    family="bert", num_layers=2, hidden_size=16, num_heads=4, max_positions=16, vocab_size=V, token_types=2,
    pair_task=True,
)  # fmt: skip
BERT = replace(MEGATRON, norm_placement="post", embedding_norm=True, activation="gelu_exact", norm_eps=1e-2)
ROBERTA = replace(BERT, token_types=1, pair_task=False, position_offset=2)
STYLES = {"megatron": MEGATRON, "bert": BERT, "roberta": ROBERTA}


@pytest.fixture(params=STYLES)
def config(request):
    return STYLES[request.param]


def random_bert(config):
    rng = np.random.default_rng(0)
    return filled(lambda key: Bert(key, config), lambda shape: rng.normal(scale=0.5, size=shape))


def masked_batch(config):
    """Two samples, the second of five tokens; the loss is on some of the real ones."""
    segments = np.array([[0] * S, [0] * 5 + [1, 1]], np.int32)
    types = np.array([[0] * 3 + [1] * 4, [0] * 2 + [1] * 3 + [0] * 2], np.int32) % config.token_types
    weights = np.float32([[0, 1, 0, 0, 0.5, 0, 0], [0, 0, 2, 0, 1, 0, 0]])
    return batch_of(
        random_tokens(B, S), labels=random_tokens(B, S, seed=1), token_types=types, segment_ids=segments,
        weights=weights, pair_labels=np.int32([1, -1]), sample_weights=np.float32([0.7, 0]),
    )  # fmt: skip


@jax.jit
def forward(model, batch):
    """Logits [B, S, V] and, with a pair task, [B, 2]."""
    hidden = model.hidden(batch, model.context(batch, Layout(), None))
    return model.logits(hidden), model.pair_logits(hidden, Layout()) if model.config.pair_task else None


def loops(model, tokens, types):
    """The same of one sample without padding, [S] -> [S, V] and [2]."""
    c = model.config
    w = {name: np.asarray(param[...], np.float64) for name, param in named_leaves(model)}
    activation = gelu if c.activation == "gelu" else gelu_exact
    x = w["word_embedding"][tokens] + w["token_type_embedding"][types]
    x = x + w["position_embedding"][np.arange(len(tokens)) + c.position_offset]
    if c.embedding_norm:
        x = norm(x, w, "embedding_norm", c)
    for number in range(c.num_layers):
        layer = {name.removeprefix("blocks."): value[number] for name, value in w.items() if name.startswith("blocks.")}
        for branch, name in (attention, "attention_norm"), (mlp, "mlp_norm"):
            if c.norm_placement == "pre":
                x = x + branch(norm(x, layer, name, c), layer, activation)
            else:
                x = norm(x + branch(x, layer, activation), layer, name, c)
    if c.norm_placement == "pre":
        x = norm(x, w, "final_norm", c)
    y = norm(activation(x @ w["transform"] + w["transform_bias"]), w, "transform_norm", c)
    logits = y @ w["word_embedding"][:V].T + w["head_bias"][:V]
    if not c.pair_task:
        return logits, None
    return logits, np.tanh(x[0] @ w["pooler"] + w["pooler_bias"]) @ w["pair_head"] + w["pair_bias"]


def attention(x, w, _):
    """[S, D] -> [S, D]: every token sees every token."""
    qkv = np.einsum("sd,dnph->psnh", x, w["attention.qkv"]) + w["attention.qkv_bias"].transpose(1, 0, 2)[:, None]
    y = w["attention.out_bias"] + np.zeros_like(x)
    for n in range(qkv.shape[2]):
        q, k, v = qkv[:, :, n]
        scores = np.exp(q @ k.T / np.sqrt(q.shape[1]))
        y += scores / scores.sum(axis=1, keepdims=True) @ v @ w["attention.out"][n]
    return y


def mlp(x, w, activation):
    return activation(x @ w["mlp.fc1"][:, 0] + w["mlp.fc1_bias"][0]) @ w["mlp.fc2"] + w["mlp.fc2_bias"]


def test_logits_match_loops(config):
    """Of both samples, the second as if its padding were not there."""
    model, batch = random_bert(config), masked_batch(config)
    logits, pair = forward(model, batch)
    for row, length in enumerate([S, 5]):
        expected, expected_pair = loops(model, batch["tokens"][row, :length], batch["token_types"][row, :length])
        np.testing.assert_allclose(logits[row, :length], expected, rtol=2e-5, atol=5e-5)
        if config.pair_task:
            np.testing.assert_allclose(pair[row], expected_pair, rtol=2e-5, atol=2e-5)


def test_tokens_see_both_sides_and_no_padding(config):
    """Another last token changes every logit of the first sample; other padding changes none of the second."""
    model, batch = random_bert(config), masked_batch(config)
    other = {**batch, "tokens": np.where(np.arange(S) == S - 1, (batch["tokens"] + 1) % V, batch["tokens"])}

    before, after = np.array(forward(model, batch)[0]), np.array(forward(model, other)[0])

    assert (np.abs(after - before)[0].max(axis=-1) > 1e-4).all()
    np.testing.assert_array_equal(after[1, :5], before[1, :5])


@pytest.mark.slow
def test_losses_and_gradients(config):
    """As if all logits had been made and nothing were computed twice; a sample without a pair label has no share."""
    model, batch = random_bert(config), masked_batch(config)

    def fused(model):
        losses = model.losses(batch, model.context(batch, Layout(), None), remat=jax.checkpoint)
        return sum(losses.values()), losses

    def naive(model):
        logits, pair = forward(model, batch)
        target = jnp.take_along_axis(jax.nn.log_softmax(logits), batch["labels"][..., None], axis=-1)[..., 0]
        losses = {"lm loss": -jnp.sum(batch["weights"] * target)}
        if config.pair_task:
            losses["sop loss"] = -0.7 * jax.nn.log_softmax(pair)[0, 1]
        return sum(losses.values()), losses

    (_, losses), gradient = jax.jit(jax.value_and_grad(fused, has_aux=True))(model)
    (_, expected), expected_gradient = jax.jit(jax.value_and_grad(naive, has_aux=True))(model)

    assert losses.keys() == expected.keys()
    np.testing.assert_allclose([*losses.values()], [*expected.values()], rtol=1e-5)
    for (name, got), (_, wanted) in zip(named_leaves(gradient), named_leaves(expected_gradient), strict=True):
        np.testing.assert_allclose(
            got[...], wanted[...], rtol=1e-4, atol=1e-5 * np.abs(wanted[...]).max(), err_msg=name
        )
    assert not gradient.head_bias[V:].any(), "padding"


def test_first_token_of_another_order():
    """A context shard holds the tokens in an order of its own; what stands elsewhere does not count, even if broken."""

    class Reversed(Layout):
        def token_order(self, length):
            return np.arange(length)[::-1]

    x = jnp.arange(12.0).reshape(2, 3, 2).at[:, 0].set(jnp.nan)
    np.testing.assert_array_equal(first_token(x, Reversed()), [[4, 5], [10, 11]])


def test_bf16(config):
    """Hidden states are bf16, losses fp32."""
    model, batch = cast(random_bert(config), jnp.bfloat16), masked_batch(config)
    hidden = jax.eval_shape(lambda m: m.hidden(batch, m.context(batch, Layout(), None)), model)
    losses = jax.eval_shape(lambda m: m.losses(batch, m.context(batch, Layout(), None)), model)
    assert hidden.dtype == jnp.bfloat16
    assert {loss.dtype for loss in losses.values()} == {jnp.dtype("float32")}


@pytest.mark.slow
def test_initial_losses_are_those_of_a_guess():
    """Of 50 ids and of two orders."""
    model, batch = Bert(jax.random.key(0), MEGATRON), masked_batch(MEGATRON)
    losses = jax.jit(lambda m: m.losses(batch, m.context(batch, Layout(), None)))(model)
    np.testing.assert_allclose(losses["lm loss"], 4.5 * np.log(V), rtol=0.05)
    np.testing.assert_allclose(losses["sop loss"], 0.7 * np.log(2), rtol=0.05)
