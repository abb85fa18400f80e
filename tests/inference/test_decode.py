"""Generation with a cache, compared with a run of the whole model for every token.

Shapes: B rows, P prompt tokens, V vocabulary.
"""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from megajax.config.model import ModelConfig
from megajax.inference import decode
from megajax.inference.decode import advance, begin, empty_caches, extend, generate
from megajax.inference.sampling import Sampling
from megajax.models.gpt import Gpt
from megajax.models.layout import Layout
from megajax.models.parameters import cast
from megajax.models.t5 import T5
from tests.models.tiny import GEMMA, GPT, LLAMA, batch_of, filled, forward, random_model, random_tokens

GREEDY = Sampling(temperature=0.0)
SWITCHED = {
    "window": replace(LLAMA, window=3),
    "alibi": replace(GPT, positions="alibi", embedding_norm=True, tied_head=True),
    "scale": replace(LLAMA, attention_scale=0.7, qk_norm=True, activation="geglu"),
    "pattern": replace(GEMMA, num_layers=5, qk_norm=True),
    "mixture": replace(LLAMA, experts=4, shared_ffn_size=8),
    "dense layers": replace(LLAMA, experts=4, dense_layers=1, num_layers=3),
}
"""Attention of Mistral and BLOOM, layers of Gemma (the last one breaks the pattern off), experts of Mixtral, and other
switches that decoding has to follow."""
T5_TINY = replace(
    LLAMA, family="t5", positions="relative", num_kv_heads=None, attention_scale=1.0, activation="relu", tied_head=True,
    encoder_layers=1, relative_buckets=8, relative_max_distance=16,
)  # fmt: skip


def continue_without_cache(model, prompts, lengths, new_tokens):
    """Greedy tokens [B, new]: every token costs a forward pass over all tokens before it."""
    tokens = np.pad(prompts, ((0, 0), (0, new_tokens)))
    for made in range(new_tokens):
        logits = np.array(forward(model, batch_of(tokens)))
        for row, length in enumerate(lengths):
            tokens[row, length + made] = logits[row, length + made - 1].argmax()
    return np.stack([row[length : length + new_tokens] for row, length in zip(tokens, lengths, strict=True)])


def test_cache_changes_nothing(config):
    """Prompts of different lengths in one batch, padded with ids that must not matter."""
    model = random_model(config)
    prompts, lengths = random_tokens(3, 6), np.array([6, 1, 4])

    out = generate(model, prompts, lengths, 0, new_tokens=9, sampling=GREEDY)

    np.testing.assert_array_equal(out.tokens, continue_without_cache(model, prompts, lengths, 9))
    np.testing.assert_array_equal(out.lengths, [9, 9, 9])
    assert not out.stopped.any()
    other_padding = np.where(np.arange(6) < lengths[:, None], prompts, 0)
    np.testing.assert_array_equal(
        generate(model, other_padding, lengths, 0, new_tokens=9, sampling=GREEDY).tokens, out.tokens
    )


@pytest.mark.parametrize("switches", SWITCHED)
def test_every_switch(switches):
    """The cache follows the maths of training whatever a query may see and however that is weighed."""
    model = random_model(SWITCHED[switches])
    prompts, lengths = random_tokens(2, 6), np.array([6, 2])

    out = generate(model, prompts, lengths, 0, new_tokens=8, sampling=GREEDY)

    np.testing.assert_array_equal(out.tokens, continue_without_cache(model, prompts, lengths, 8))


def test_encoder_reads_the_prompts():
    """Ragged prompts of a T5: the decoder goes on from its first token as if all were computed anew each time."""
    model = filled(lambda key: T5(key, T5_TINY), lambda shape: np.random.default_rng(0).normal(scale=0.5, size=shape))
    prompts, lengths = random_tokens(2, 6), np.array([6, 2])

    state = begin(model, prompts, lengths, 0, new_tokens=7, first_token=3)
    out = advance(model, state, 7, sampling=GREEDY)

    padding = (np.arange(6) >= lengths[:, None]).astype(np.int32)

    @jax.jit
    def likeliest(model, tokens):
        batch = {"tokens": prompts, "segment_ids": padding, "decoder_tokens": tokens}
        batch["decoder_segment_ids"] = jnp.zeros((2, 8), jnp.int32)
        return model.logits(model.hidden(batch, model.context(batch, Layout(), None))).argmax(-1)

    tokens = np.full((2, 8), 3, np.int32)
    for place in range(7):
        tokens[:, place + 1] = likeliest(model, tokens)[:, place]
    np.testing.assert_array_equal(out.tokens, tokens[:, 1:])
    assert len({*out.tokens[0].tolist(), *out.tokens[1].tolist()}) > 2


def test_prompt_in_pieces(config):
    """Hidden states do not depend on how the tokens are cut: 5 and 3 are 8."""
    model, tokens = random_model(config), random_tokens(2, 8)

    @jax.jit
    def in_pieces(model):
        first, caches = extend(model, model.units, empty_caches(model, 2, 8), tokens[:, :5], jnp.array([0, 0]))
        second, _ = extend(model, model.units, caches, tokens[:, 5:], jnp.array([5, 5]))
        return model.logits(jnp.concatenate([first, second], axis=1))

    np.testing.assert_allclose(in_pieces(model), forward(model, batch_of(tokens)), rtol=1e-5, atol=2e-5)


def test_tokens_a_few_at_a_time():
    """Stopping to look after 1, 4 and 5 tokens changes nothing, drawn or not."""
    model, prompts, lengths = random_model(LLAMA), random_tokens(2, 4), np.array([4, 3])
    how = {"sampling": Sampling(top_k=20), "end_ids": (49,)}
    whole = generate(model, prompts, lengths, 5, new_tokens=9, **how)

    state = begin(model, prompts, lengths, 5, new_tokens=9)
    for until in (1, 4, 5, 100):
        state = advance(model, state, until, **how)

    np.testing.assert_array_equal(state.tokens, whole.tokens)
    np.testing.assert_array_equal(state.log_probabilities, whole.log_probabilities)


def test_log_probabilities(config):
    """Of new tokens and prompt, against a softmax over the logits of the whole forward pass; temperature is no part."""
    model, prompts, lengths = random_model(config), random_tokens(2, 5), np.array([5, 3])

    state = begin(model, prompts, lengths, 3, new_tokens=4, score_prompts=True)
    out = advance(model, state, 4, sampling=Sampling(temperature=3.0))

    for row, length in enumerate(lengths):
        tokens = np.concatenate([prompts[row, :length], out.tokens[row]])
        logits = forward(model, batch_of(tokens[None]))[0]
        expected = jax.nn.log_softmax(logits)[np.arange(length + 3), tokens[1:]]
        found = np.concatenate([out.prompt_log_probabilities[row, : length - 1], out.log_probabilities[row]])
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)


def test_write_positions(monkeypatch):
    """A prompt of 6 fills positions 0 to 5, then come 6, 7, 8, 9. A prompt of 2 beside it goes on at 2."""
    written = []

    def note(keys, values):
        np.testing.assert_array_equal(keys, values)
        written.append([np.flatnonzero(row).tolist() for row in keys])

    def watched(model, units, caches, *args):
        hidden, new = extend(model, units, caches, *args)
        changed = ((old != now).any(axis=(0, 3, 4)) for old, now in zip(caches[0].whole, new[0].whole, strict=True))
        jax.debug.callback(note, *changed, ordered=True)
        return hidden, new

    monkeypatch.setattr(decode, "extend", watched)
    monkeypatch.setattr(decode, "begin", partial(jax.jit, static_argnames=("new_tokens",))(begin.__wrapped__))
    monkeypatch.setattr(
        decode, "advance", partial(jax.jit, static_argnames=("sampling", "end_ids"))(advance.__wrapped__)
    )
    jax.block_until_ready(
        generate(random_model(LLAMA), random_tokens(2, 6), np.array([6, 2]), 0, new_tokens=4, sampling=GREEDY)
    )
    jax.effects_barrier()

    prompt = [0, 1, 2, 3, 4, 5]
    assert written == [[prompt, prompt], [[6], [2]], [[7], [3]], [[8], [4]], [[9], [5]]]


def scripted_model(script):
    """A model that says script[p] after the token at position p, whatever the tokens are."""
    config = ModelConfig(
        num_layers=1, hidden_size=16, num_heads=1, max_positions=len(script), vocab_size=16, tied_head=False
    )
    model = filled(lambda key: Gpt(key, config), np.zeros)
    model.position_embedding[...] = jnp.eye(16)[jnp.array(script)]
    model.final_norm.scale[...] = jnp.ones(16)
    model.head[...] = jnp.eye(128, 16)
    return model


def test_any_end_token_ends_its_row():
    """End tokens {2, 11}. Row 0 says 7 11 ..., row 1 says 7 7 2, row 2 never ends; none changes another."""
    model = scripted_model([7, 11, 5, 5, 7, 7, 2, 5, 5, 5, 5, 5])
    prompts, lengths = np.ones((3, 8), np.int32), np.array([1, 5, 8])
    run = partial(generate, model, seed=0, new_tokens=4, sampling=GREEDY, end_ids=(2, 11))

    out = run(prompts, lengths)

    np.testing.assert_array_equal(out.lengths, [2, 3, 4])
    np.testing.assert_array_equal(out.stopped, [True, True, False])
    rows = [row[:length].tolist() for row, length in zip(out.tokens, out.lengths, strict=True)]
    assert rows == [[7, 11], [7, 7, 2], [5, 5, 5, 5]]
    for row, expected in enumerate(rows):  # the same beside rows that never end
        others = run(prompts, np.where(np.arange(3) == row, lengths, 8))
        assert others.tokens[row, : others.lengths[row]].tolist() == expected


def test_seeds():
    """A model to which all ids are alike shows the draws themselves.

    They differ between seeds, rows and positions, are the same again, and the same whether a row is alone or not.
    """
    model = filled(lambda key: Gpt(key, replace(GPT, max_positions=32)), np.zeros)

    def draw(seed, rows=4):
        prompts, lengths = np.full((rows, 3), 7), np.full(rows, 3)
        out = generate(model, prompts, lengths, seed, new_tokens=20, sampling=Sampling(temperature=1.0))
        return [tuple(row.tolist()) for row in out.tokens]

    first = draw(7)
    assert draw(7) == first
    assert draw(7, rows=1) == first[:1]
    assert len({*first, *draw(8)}) == 8
    assert all(len(set(row)) > 10 for row in first)


def test_rows_have_numbers():
    """Row 3 draws the same whatever stands in the rows before it, or whether there are any."""
    model = filled(lambda key: Gpt(key, GPT), np.zeros)
    run = partial(begin, model, seed=7, new_tokens=8)
    prompts, lengths = np.full((4, 3), 7), np.full(4, 3)
    together = advance(model, run(prompts, lengths), 8, sampling=Sampling())
    alone = advance(model, run(prompts[:1], lengths[:1], rows=np.array([3])), 8, sampling=Sampling())
    np.testing.assert_array_equal(alone.tokens[0], together.tokens[3])


def test_bf16_model(config):
    """The cache is in the dtype of the weights."""
    model = cast(random_model(config), jnp.bfloat16)
    assert empty_caches(model, 2, 5)[0].whole.keys.dtype == jnp.bfloat16
    run = partial(generate, new_tokens=3, sampling=GREEDY)
    out = jax.eval_shape(run, model, random_tokens(2, 4), np.array([4, 3]), jnp.uint32(0))
    assert out.tokens.shape == (2, 3)
