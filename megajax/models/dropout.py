"""Dropout whose masks do not depend on the layout.

The mask of a token is a function of (seed, step, global sample number, layer, site, position in the sequence). So the
device that holds the token draws the same bits under every layout. Sites are numbered below.

Shapes: B batch.
"""

from __future__ import annotations

from typing import Literal, get_args

import jax
import jax.numpy as jnp

from megajax.models.layout import Layout

Site = Literal["embedding", "attention", "attention_output", "mlp_output", "cross_attention", "cross_attention_output"]
SITES: tuple[Site, ...] = get_args(Site)


def sample_keys(seed: int | jax.Array, step: jax.Array, sample_ids: jax.Array) -> jax.Array:
    """Return one key for each sample, [B], from global sample numbers [B]."""
    key = jax.random.fold_in(jax.random.key(seed), step)
    return jax.vmap(jax.random.fold_in, (None, 0))(key, sample_ids)


def layer_keys(keys: jax.Array, layer: jax.Array | int) -> jax.Array:
    """Return the keys [B] of one layer from sample keys [B]; the embedding is layer 0, and blocks count from 1."""
    return jax.vmap(jax.random.fold_in, (0, None))(keys, layer)


def dropout(
    x: jax.Array,
    rate: float,
    keys: jax.Array | None,
    site: Site,
    layout: Layout,
    axes: tuple[str | None, ...],
    tokens: int = 1,
) -> jax.Array:
    """Zero a share `rate` of x and scale the rest by 1 / (1 - rate).

    Args:
        x: array [B, ...] with one key per row of the batch, and the tokens along dimension `tokens`.
        rate: share of the numbers that is dropped.
        keys: keys of this layer, [B], or None for no dropout (evaluation).
        site: name of this dropout among those of the layer.
        layout: layout that shards the mask like x and knows the order of tokens.
        axes: logical axes of x.
        tokens: dimension of x along which the tokens lie.
    """
    if keys is None or rate == 0.0:
        return x
    places = jnp.asarray(layout.token_order(x.shape[tokens]))
    site_keys = layer_keys(keys, SITES.index(site))
    token_keys = jax.vmap(jax.vmap(jax.random.fold_in, (None, 0)), (0, None))(site_keys, places)
    rest = x.shape[1:tokens] + x.shape[tokens + 1 :]
    keep = jax.vmap(jax.vmap(lambda key: jax.random.bernoulli(key, 1.0 - rate, rest)))(token_keys)
    keep = layout.shard(jnp.moveaxis(keep, 1, tokens), *axes)
    return jnp.where(keep, x / (1.0 - rate), 0.0).astype(x.dtype)
