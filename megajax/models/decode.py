"""Generation with a key/value cache: one `extend` serves the prompt (many tokens) and every new token (one).

Prompts of different lengths share a batch, padded at the right. A row's next token is written at that row's own length,
over the padding, before anything attends to it, so padding is never seen.

Shapes: B rows, P prompt tokens, C cache length, L layers, N heads, K kv heads, H head dim, V vocabulary that counts.
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp

from megajax.models.attention_kernels import xla_attention
from megajax.models.block import Block
from megajax.models.context import Context
from megajax.models.gpt import Gpt
from megajax.models.layout import Layout
from megajax.models.sampling import Sampling, choose_token


class Cache(NamedTuple):
    """Keys and values of every position so far, [L, B, C, K, H] each."""

    keys: jax.Array
    values: jax.Array


class Generated(NamedTuple):
    """Tokens after the prompts."""

    tokens: jax.Array
    """[B, new] int32; what follows a row's end is not meaningful."""
    lengths: jax.Array
    """[B] new tokens of each row, the end-of-document token included."""
    stopped: jax.Array
    """[B] bool, True where an end token came (finish reason "stop"), False where the room ran out ("length")."""


def empty_cache(model: Gpt, rows: int, length: int) -> Cache:
    """A cache for `rows` sequences of at most `length` tokens."""
    c = model.config
    shape = (c.num_layers, rows, length, c.kv_heads, c.head_size)
    return Cache(jnp.zeros(shape, model.word_embedding.dtype), jnp.zeros(shape, model.word_embedding.dtype))


def extend(model: Gpt, cache: Cache, tokens: jax.Array, start: jax.Array) -> tuple[jax.Array, Cache]:
    """Append tokens [B, S] at positions start [B], start + 1, ...; returns hidden states [B, S, D] and the cache."""
    positions = start[:, None] + jnp.arange(tokens.shape[1])
    batch = {"tokens": tokens, "positions": positions}
    context = model.context(batch, Layout(), keys=None)
    visible = positions[:, :, None] >= jnp.arange(cache.keys.shape[2])

    def layer(
        x: jax.Array, inputs: tuple[Block, jax.Array, jax.Array]
    ) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
        block, keys, values = inputs

        def attend(x: jax.Array, context: Context) -> jax.Array:
            nonlocal keys, values
            q, k, v = block.attention.project(x, context)
            keys, values = _write(keys, k, start), _write(values, v, start)
            return block.attention.output(xla_attention(q, keys, values, visible), context)

        x = block.residual(x, context, attend)
        return x, (keys, values)

    x, (keys, values) = jax.lax.scan(layer, model.embed(batch, context), (model.blocks, cache.keys, cache.values))
    return model.final_norm(x), Cache(keys, values)


def _write(cache: jax.Array, new: jax.Array, start: jax.Array) -> jax.Array:
    """Put new [B, S, K, H] into cache [B, C, K, H] at each row's own start."""
    return jax.vmap(lambda row, x, at: jax.lax.dynamic_update_slice_in_dim(row, x, at, axis=0))(cache, new, start)


@partial(jax.jit, static_argnames=("new_tokens", "sampling", "end_ids"))
def generate(
    model: Gpt,
    prompts: jax.Array,
    lengths: jax.Array,
    seed: jax.Array,
    *,
    new_tokens: int,
    sampling: Sampling,
    end_ids: tuple[int, ...] = (),
) -> Generated:
    """Continue prompts.

    Args:
        model: weights in the dtype to compute in, on one device.
        prompts: [B, P] ids, padded at the right.
        lengths: [B] real tokens of each prompt, at least 1.
        seed: of the sampling; row i draws from (seed, i, position) whatever the other rows are.
        new_tokens: how many at most.
        sampling: how to choose.
        end_ids: any of these ends a row.
    """
    rows, prompt_length = prompts.shape
    row_keys = jax.vmap(jax.random.fold_in, (None, 0))(jax.random.key(seed), jnp.arange(rows))
    hidden, cache = extend(
        model, empty_cache(model, rows, prompt_length + new_tokens), prompts, jnp.zeros_like(lengths)
    )
    last = jnp.take_along_axis(hidden, (lengths - 1)[:, None, None], axis=1)[:, 0]
    ends = jnp.array(end_ids, jnp.int32)

    class Loop(NamedTuple):
        made: jax.Array
        cache: Cache
        last: jax.Array
        tokens: jax.Array
        done: jax.Array
        new: jax.Array

    def body(s: Loop) -> Loop:
        at = lengths + s.made
        keys = jax.vmap(jax.random.fold_in)(row_keys, at)
        token = jax.vmap(partial(choose_token, sampling=sampling))(model.logits(s.last), keys)
        new = s.new + ~s.done
        done = s.done | jnp.isin(token, ends)
        hidden, cache = extend(model, s.cache, token[:, None], at)
        return Loop(s.made + 1, cache, hidden[:, 0], s.tokens.at[:, s.made].set(token), done, new)

    tokens = jnp.zeros((rows, new_tokens), jnp.int32)
    start = Loop(jnp.int32(0), cache, last, tokens, jnp.zeros(rows, bool), jnp.zeros(rows, jnp.int32))
    end = jax.lax.while_loop(lambda s: (s.made < new_tokens) & ~s.done.all(), body, start)
    return Generated(end.tokens, end.new, end.done)
