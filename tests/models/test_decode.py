"""Generation with a cache against running the whole model again for every token.

Shapes: B rows, P prompt tokens, V vocabulary.
"""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from megajax.config.model import ModelConfig
from megajax.models import decode
from megajax.models.decode import empty_cache, extend, generate
from megajax.models.gpt import Gpt
from megajax.models.parameters import cast
from megajax.models.sampling import Sampling
from tests.models.tiny import GPT, LLAMA, batch_of, filled, forward, random_model, random_tokens

GREEDY = Sampling(temperature=0.0)


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


def test_prompt_in_pieces(config):
    """Hidden states do not depend on how the tokens are cut: 5 and 3 are 8."""
    model, tokens = random_model(config), random_tokens(2, 8)

    @jax.jit
    def in_pieces(model):
        first, cache = extend(model, empty_cache(model, 2, 8), tokens[:, :5], jnp.array([0, 0]))
        second, _ = extend(model, cache, tokens[:, 5:], jnp.array([5, 5]))
        return model.logits(jnp.concatenate([first, second], axis=1))

    np.testing.assert_allclose(in_pieces(model), forward(model, batch_of(tokens)), rtol=1e-5, atol=2e-5)


def test_write_positions(monkeypatch):
    """Case G02: a prompt of 6 fills positions 0 to 5, then come 6, 7, 8, 9. A prompt of 2 beside it goes on at 2."""
    written = []

    def note(keys, values):
        np.testing.assert_array_equal(keys, values)
        written.append([np.flatnonzero(row).tolist() for row in keys])

    def watched(model, cache, tokens, start):
        hidden, new = extend(model, cache, tokens, start)
        changed = ((old != now).any(axis=(0, 3, 4)) for old, now in zip(cache, new, strict=True))
        jax.debug.callback(note, *changed, ordered=True)
        return hidden, new

    monkeypatch.setattr(decode, "extend", watched)
    run = jax.jit(partial(generate.__wrapped__, new_tokens=4, sampling=GREEDY))
    jax.block_until_ready(run(random_model(LLAMA), random_tokens(2, 6), np.array([6, 2]), 0))
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
    """Case G04: end tokens {2, 11}. Row 0 says 7 11 ..., row 1 says 7 7 2, row 2 never ends; none changes another."""
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
    """Case G08: a model to which all ids are alike shows the draws themselves.

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


def test_bf16_model(config):
    """The cache is in the dtype of the weights."""
    model = cast(random_model(config), jnp.bfloat16)
    assert empty_cache(model, 2, 5).keys.dtype == jnp.bfloat16
    run = partial(generate, new_tokens=3, sampling=GREEDY)
    out = jax.eval_shape(run, model, random_tokens(2, 4), np.array([4, 3]), jnp.uint32(0))
    assert out.tokens.shape == (2, 3)
