"""Both versions of T5, compared with float64 loops: masks, the loss and its gradient, dropout of two stacks.

Shapes: B batch, S encoder sequence, T decoder sequence, D embed, N heads, H head dim, V vocabulary without padding.
"""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from megajax.config.model import ModelConfig
from megajax.models.dropout import sample_keys
from megajax.models.layout import Layout
from megajax.models.parameters import cast, named_leaves
from megajax.models.t5 import T5
from tests.models.reference import gelu, norm
from tests.models.tiny import filled, random_tokens

B, S, T, V = 2, 9, 6, 50
VERSION_1_0 = ModelConfig(
    family="t5", num_layers=2, encoder_layers=3, hidden_size=16, num_heads=4, head_dim=6, ffn_hidden_size=24,
    max_positions=16, vocab_size=V, positions="relative", relative_buckets=8, relative_max_distance=6,
    attention_scale=1.0, norm="rmsnorm", norm_eps=1e-2, activation="relu", bias=False,
)  # fmt: skip
VERSION_1_1 = replace(VERSION_1_0, activation="geglu", tied_head=False)
VERSIONS = {"1.0": VERSION_1_0, "1.1": VERSION_1_1}
LENGTHS = [(S, T - 1), (S - 3, T)]
"""Real tokens of encoder and decoder in each sample."""


@pytest.fixture(params=VERSIONS)
def config(request):
    return VERSIONS[request.param]


def random_t5(config):
    rng = np.random.default_rng(0)
    return filled(lambda key: T5(key, config), lambda shape: rng.normal(scale=0.4, size=shape))


def padded_batch():
    lengths = np.array(LENGTHS)
    decoder_padding = np.arange(T) >= lengths[:, 1:]
    return {
        "tokens": random_tokens(B, S),
        "segment_ids": (np.arange(S) >= lengths[:, :1]).astype(np.int32),
        "decoder_tokens": random_tokens(B, T, seed=1),
        "decoder_segment_ids": decoder_padding.astype(np.int32),
        "labels": random_tokens(B, T, seed=2),
        "weights": np.float32(~decoder_padding * np.random.default_rng(3).uniform(size=(B, T))),
    }


@jax.jit
def forward(model, batch):
    """Logits [B, T, V]."""
    return model.logits(model.hidden(batch, model.context(batch, Layout(), None)))


def loops(model, tokens, decoder_tokens):
    """The same of one sample without padding, [S] and [T] -> [T, V]."""
    c = model.config
    w = {name: np.asarray(param[...], np.float64) for name, param in named_leaves(model)}

    def layers(stack, count):
        for number in range(count):
            yield {name.removeprefix(stack): value[number] for name, value in w.items() if name.startswith(stack)}

    x = w["word_embedding"][tokens]
    for layer in layers("encoder_blocks.", c.encoder_layers):
        x = x + self_attention(norm(x, layer, "attention_norm", c), layer, w["encoder_bias"], encoder_bucket)
        x = x + mlp(norm(x, layer, "mlp_norm", c), layer)
    memory = norm(x, w, "encoder_norm", c)
    x = w["word_embedding"][decoder_tokens]
    for layer in layers("blocks.", c.num_layers):
        x = x + self_attention(norm(x, layer, "attention_norm", c), layer, w["decoder_bias"], decoder_bucket)
        q = np.einsum("td,dnh->tnh", norm(x, layer, "cross_norm", c), layer["cross.q"])
        kv = np.einsum("sd,dnph->psnh", memory, layer["cross.kv"])
        x = x + attend(q, *kv, lambda t, s: 0) @ layer["cross.out"].reshape(-1, 16)
        x = x + mlp(norm(x, layer, "mlp_norm", c), layer)
    x = norm(x, w, "final_norm", c)
    return x / 4 @ w["word_embedding"][:V].T if c.tied_head else x @ w["head"][:V].T


def self_attention(x, w, table, bucket):
    q, k, v = np.einsum("sd,dnph->psnh", x, w["attention.qkv"])

    def bias(t, s):
        number = bucket(s - t)
        return -np.inf if number is None else table[number]

    return attend(q, k, v, bias) @ w["attention.out"].reshape(-1, 16)


def attend(q, k, v, bias):
    """[T, N, H] queries, [S, N, H] keys and values -> [T, N H]; scores are not scaled."""
    scores = np.array([[(q[t] * k[s]).sum(axis=-1) + bias(t, s) for s in range(len(k))] for t in range(len(q))])
    scores = np.exp(scores - scores.max(axis=1, keepdims=True))
    return np.einsum("tsn,snh->tnh", scores / scores.sum(axis=1, keepdims=True), v).reshape(len(q), -1)


def encoder_bucket(distance):
    """Of 8, four on each side: two near ones and, from 2 on, 2 + int(2 log(distance / 2) / log(6 / 2))."""
    return [0, 1, 2, 2, 3, 3, 3][min(abs(distance), 6)] + 4 * (distance > 0)


def decoder_bucket(distance):
    """Of 8: four near ones and, from 4 on, 4 + int(4 log(distance / 4) / log(6 / 4)); none for the future."""
    return None if distance > 0 else [0, 1, 2, 3, 4, 6, 7][min(-distance, 6)]


def mlp(x, w):
    hidden = np.einsum("sd,dpf->psf", x, w["mlp.fc1"])
    return (gelu(hidden[0]) * hidden[1] if len(hidden) == 2 else np.maximum(hidden[0], 0)) @ w["mlp.fc2"]


def test_logits_match_loops(config):
    model, batch = random_t5(config), padded_batch()
    logits = forward(model, batch)
    for row, (source, target) in enumerate(LENGTHS):
        expected = loops(model, batch["tokens"][row, :source], batch["decoder_tokens"][row, :target])
        np.testing.assert_allclose(logits[row, :target], expected, rtol=2e-5, atol=2e-4)


def test_who_sees_whom(config):
    """The last real token of the encoder reaches every place of the decoder, one of the decoder only those from it on,
    padding none."""
    model, batch = random_t5(config), padded_batch()

    def changed(name, place):
        """By how much each logit of the second sample moves when one of its tokens is another."""
        tokens = batch[name].copy()
        tokens[1, place] = (tokens[1, place] + 1) % V
        return np.abs(forward(model, {**batch, name: tokens}) - before)[1].max(axis=-1)

    before = forward(model, batch)
    assert (changed("tokens", S - 4) > 1e-4).all()
    assert not changed("tokens", S - 3).any()
    np.testing.assert_array_equal(changed("decoder_tokens", 2) > 1e-4, [False, False, True, True, True, True])


@pytest.mark.slow
def test_loss_and_gradient(config):
    """As if all logits had been made and nothing were computed twice."""
    model, batch = random_t5(config), padded_batch()

    def fused(model):
        return model.losses(batch, model.context(batch, Layout(), None), remat=jax.checkpoint)["lm loss"]

    def naive(model):
        log_probabilities = jax.nn.log_softmax(forward(model, batch))
        target = jnp.take_along_axis(log_probabilities, batch["labels"][..., None], axis=-1)[..., 0]
        return -jnp.sum(batch["weights"] * target)

    loss, gradient = jax.jit(jax.value_and_grad(fused))(model)
    expected, expected_gradient = jax.jit(jax.value_and_grad(naive))(model)

    np.testing.assert_allclose(loss, expected, rtol=1e-5)
    for (name, got), (_, wanted) in zip(named_leaves(gradient), named_leaves(expected_gradient), strict=True):
        np.testing.assert_allclose(
            got[...], wanted[...], rtol=1e-4, atol=1e-5 * np.abs(wanted[...]).max(), err_msg=name
        )
        assert np.abs(wanted[...]).max() > 1e-4, name


def test_bf16(config):
    """Hidden states are bf16, losses fp32."""
    model, batch = cast(random_t5(config), jnp.bfloat16), padded_batch()
    hidden = jax.eval_shape(lambda m: m.hidden(batch, m.context(batch, Layout(), None)), model)
    losses = jax.eval_shape(lambda m: m.losses(batch, m.context(batch, Layout(), None)), model)
    assert hidden.dtype == jnp.bfloat16
    assert {loss.dtype for loss in losses.values()} == {jnp.dtype("float32")}


@pytest.mark.slow
def test_initial_loss_is_that_of_a_guess(config):
    """Also where the head divides by sqrt(D): 50 ids."""
    model, batch = T5(jax.random.key(0), config), padded_batch()
    loss = jax.jit(lambda m: m.losses(batch, m.context(batch, Layout(), None))["lm loss"])(model)
    np.testing.assert_allclose(loss, batch["weights"].sum() * np.log(V), rtol=0.02)


def test_encoder_and_decoder_drop_differently():
    """The only layer of each adds the same large number everywhere: what is still small has been dropped."""
    config = replace(VERSION_1_0, num_layers=1, encoder_layers=1, hidden_dropout=0.5)
    model = filled(lambda key: T5(key, config), np.ones)
    for attention in (model.encoder_blocks.attention, model.blocks.attention, model.blocks.cross):
        attention.out[...] = jnp.zeros(attention.out.shape)
    tokens = np.zeros((4, 6), np.int32)
    batch = {"tokens": tokens, "decoder_tokens": tokens}

    @jax.jit
    def run(model):
        context = model.context(batch, Layout(), sample_keys(0, jnp.int32(0), jnp.arange(4)))
        context = model.encode(batch, context)
        return context.memory[0], model.decode(batch, context)

    encoder, decoder = (np.array(x > x.max(axis=-1, keepdims=True) / 2) for x in run(model))
    for kept in (encoder, decoder, encoder == decoder):
        assert abs(kept.mean() - 0.5) < 0.1
