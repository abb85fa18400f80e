"""Generation with a key/value cache: one `extend` serves the prompt (many tokens) and every new token (one).

Prompts of different lengths share a batch, padded at the right. A row's next token is written at that row's own length,
over the padding, before any query attends to that place. So no token ever attends to padding.

In a model with an encoder, the encoder reads the prompt, and the decoder begins with a token of its own (`decode_t5`).

`generate` makes all tokens in one call. To see them in between, call `begin` and then `advance` repeatedly: the tokens
are the same.

Shapes: B rows, P prompt tokens, C cache length, L layers, N heads, K kv heads, H head dim, D embed, V vocabulary
without padding.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from megajax.inference.decode_t5 import Memory, encode_prompts, look_at
from megajax.inference.sampling import Sampling, choose_token
from megajax.inference.scores import score_tokens, token_log_probabilities
from megajax.models.block import Block, Units, in_units, scan_units, side_by_side
from megajax.models.context import Context
from megajax.models.gpt import Gpt
from megajax.models.layout import Layout, attend
from megajax.models.t5 import T5

ONE_DEVICE = Layout()


class Cache(NamedTuple):
    """The keys and values of a layer so far, [B, C, K, H] each: rows cut over replicas, heads over `tensor`."""

    keys: jax.Array
    values: jax.Array


Caches = tuple[Units, ...]
"""Caches of all layers, divided like `Model.units`."""


class Generation(NamedTuple):
    """The state of a generation: prompts and new tokens; numbers after a row's end are not meaningful."""

    tokens: jax.Array
    """New tokens [B, new], int32."""
    log_probabilities: jax.Array
    """Log-probabilities [B, new] of the new tokens under the model itself, before temperature and filters, fp32."""
    lengths: jax.Array
    """Number of new tokens of each row [B], the end token included."""
    stopped: jax.Array
    """Flags [B], True where an end token came (finish reason "stop"), False where the room ran out ("length")."""
    prompt_log_probabilities: jax.Array
    """Log-probabilities [B, P - 1] of every prompt token but the first, fp32, or [B, 0] if not asked for."""
    made: jax.Array
    """Number of new tokens of the row that has the most, a scalar."""
    starts: jax.Array
    """Number of tokens before the first new one [B]: length of the prompt, or 1 where an encoder reads it."""
    keys: jax.Array
    """Random keys of the rows [B]."""
    hidden: jax.Array
    """Hidden states [B, D] of every row's newest token."""
    caches: Caches
    memory: Memory | None
    """Encoded prompts, if there is an encoder."""


def empty_caches(model: Gpt | T5, rows: int, length: int, layout: Layout = ONE_DEVICE) -> Caches:
    """Make the caches for `rows` sequences of at most `length` tokens."""
    c = model.config

    def empty(blocks: Block) -> Units:
        layers = jax.tree.leaves(blocks)[0].shape[0]
        zeros = jnp.zeros((layers, rows, length, c.kv_heads, c.head_size), model.word_embedding.dtype)
        return in_units(Cache(*[layout.shard(zeros, None, "batch", None, "kv_heads", None)] * 2), len(c.kind_pattern))

    return tuple(empty(blocks) for blocks in model.trunk)


def extend(
    model: Gpt | T5,
    units: tuple[Units, ...],
    caches: Caches,
    tokens: jax.Array,
    start: jax.Array,
    layout: Layout = ONE_DEVICE,
    memory: Memory | None = None,
) -> tuple[jax.Array, Caches]:
    """Append tokens [B, S] at positions start [B], start + 1, ...; return hidden states [B, S, D] and the caches.

    The model's `units` are passed as well, so that the weights are divided once and not for every token.
    """
    places = start[:, None] + jnp.arange(tokens.shape[1])
    cached = jnp.arange(caches[0].whole.keys.shape[-3])
    batch = {"tokens": tokens, "decoder_tokens": tokens, "positions": places}
    context = model.context(batch, layout, keys=None)

    def layer(context: Context, x: jax.Array, block: Any, cache: Cache, seen: Any) -> tuple[jax.Array, Cache]:
        block, (keys, values) = layout.weights(block), cache

        def look_back(x: jax.Array, context: Context) -> jax.Array:
            nonlocal keys, values
            attention = block.attention
            q, k, v = attention.project(x, context)
            keys, values = _write(keys, k, start, layout), _write(values, v, start, layout)
            heads = attend(q, keys, values, attention.pattern(context), (places, cached), (None, None))
            return attention.output(heads, context)

        if memory is None:
            x, _ = block.residual(x, context, look_back)
        else:
            x, _ = block.residual(x, context, look_back, partial(look_at, block.cross, seen, memory.padding))
        return x, Cache(keys, values)

    x, made = model.embed(batch, context), []
    layers = [partial(layer, of_kind) for of_kind in context.of_kinds]
    seen = Units(None if memory is None else memory.keys_values, None)
    for blocks, cache in zip(units, caches, strict=True):
        x, new = scan_units(layers, x, side_by_side(blocks, cache, seen))
        made.append(new)
    return model.final_norm(x), tuple(made)


def _write(cache: jax.Array, new: jax.Array, start: jax.Array, layout: Layout) -> jax.Array:
    """Write new [B, S, K, H] into cache [B, C, K, H] at each row's own start."""
    cache = jax.vmap(lambda row, x, at: jax.lax.dynamic_update_slice_in_dim(row, x, at, axis=0))(cache, new, start)
    return layout.shard(cache, "batch", None, "kv_heads", None)


@partial(jax.jit, static_argnames=("new_tokens", "layout", "score_prompts"))
def begin(
    model: Gpt | T5,
    prompts: jax.Array,
    lengths: jax.Array,
    seed: jax.Array,
    *,
    new_tokens: int,
    rows: jax.Array | None = None,
    layout: Layout = ONE_DEVICE,
    score_prompts: bool = False,
    first_token: jax.Array | int = 0,
) -> Generation:
    """Read the prompts and return a generation that has no new tokens yet.

    Args:
        model: weights in the dtype of the computation, sharded by `layout`.
        prompts: [B, P] ids, padded at the right.
        lengths: [B] real tokens of each prompt, at least 1.
        seed: seed of the sampling; row i draws from (seed, i, position) whatever the other rows are.
        new_tokens: largest number of new tokens.
        rows: [B] numbers of the rows, where they are not 0, 1, ...
        layout: layout on a mesh; B is a multiple of its replicas.
        score_prompts: whether to compute the log-probabilities of the prompts' own tokens (no encoder).
        first_token: token that the decoder of an encoder-decoder model begins with.
    """
    batch = len(prompts)
    rows = jnp.arange(batch) if rows is None else rows
    prompts, memory = layout.shard(prompts, "batch", None), None
    if isinstance(model, T5):
        memory = encode_prompts(model, prompts, lengths, layout)
        prompts, lengths = jnp.full((batch, 1), first_token), jnp.ones_like(lengths)
    caches = empty_caches(model, batch, prompts.shape[1] + new_tokens, layout)
    hidden, caches = extend(model, model.units, caches, prompts, jnp.zeros_like(lengths), layout, memory)
    scores = jnp.zeros((batch, 0), jnp.float32)
    if score_prompts:
        scores = score_tokens(model, hidden[:, :-1], prompts[:, 1:], layout).log_probabilities
    return Generation(
        tokens=jnp.zeros((batch, new_tokens), jnp.int32),
        log_probabilities=jnp.zeros((batch, new_tokens), jnp.float32),
        lengths=jnp.zeros(batch, jnp.int32),
        stopped=jnp.zeros(batch, bool),
        prompt_log_probabilities=scores,
        made=jnp.int32(0),
        starts=lengths,
        keys=jax.vmap(jax.random.fold_in, (None, 0))(jax.random.key(seed), rows),
        hidden=jnp.take_along_axis(hidden, (lengths - 1)[:, None, None], axis=1)[:, 0],
        caches=caches,
        memory=memory,
    )


@partial(jax.jit, static_argnames=("sampling", "end_ids", "layout"), donate_argnames="state")
def advance(
    model: Gpt | T5,
    state: Generation,
    until: jax.Array | int,
    *,
    sampling: Sampling,
    end_ids: tuple[int, ...] = (),
    layout: Layout = ONE_DEVICE,
) -> Generation:
    """Generate new tokens until there are `until`, or every row has stopped.

    Args:
        model: as in `begin`.
        state: generation so far, which must not be used afterwards (its memory is reused).
        until: number of new tokens, counted from the prompt on; at most the room of the generation.
        sampling: settings with which tokens are chosen.
        end_ids: tokens of which any one ends a row.
        layout: as in `begin`.
    """
    ends, units = jnp.array(end_ids, jnp.int32), model.units

    def step(s: Generation) -> Generation:
        at = s.starts + s.made
        logits = layout.shard(model.logits(s.hidden), "batch", None)
        token = jax.vmap(partial(choose_token, sampling=sampling))(logits, jax.vmap(jax.random.fold_in)(s.keys, at))
        hidden, caches = extend(model, units, s.caches, token[:, None], at, layout, s.memory)
        return s._replace(
            tokens=s.tokens.at[:, s.made].set(token),
            log_probabilities=s.log_probabilities.at[:, s.made].set(token_log_probabilities(logits, token)),
            lengths=s.lengths + ~s.stopped,
            stopped=s.stopped | jnp.isin(token, ends),
            made=s.made + 1,
            hidden=hidden[:, 0],
            caches=caches,
        )

    room = jnp.minimum(until, state.tokens.shape[1])
    return jax.lax.while_loop(lambda s: (s.made < room) & ~s.stopped.all(), step, state)


def generate(
    model: Gpt | T5,
    prompts: jax.Array,
    lengths: jax.Array,
    seed: jax.Array,
    *,
    new_tokens: int,
    sampling: Sampling,
    end_ids: tuple[int, ...] = (),
) -> Generation:
    """Continue prompts on one device, with arguments as in `begin` and `advance`."""
    state = begin(model, prompts, lengths, seed, new_tokens=new_tokens)
    return advance(model, state, new_tokens, sampling=sampling, end_ids=end_ids)
