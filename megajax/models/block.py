"""Transformer blocks, singly and stacked in a scan, each turn of which runs a pattern of kinds of layers.

Shapes: B batch, S sequence, D embed, L layers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple, Protocol, TypeVar

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from megajax.config.model import ModelConfig
from megajax.models.attention import Attention
from megajax.models.context import Context
from megajax.models.dropout import Site, dropout, layer_keys
from megajax.models.feed_forward import Mlp, Moe
from megajax.models.layers import Norm
from megajax.models.losses import Losses

RESIDUAL = ("batch", "residual_sequence", None)
Attend = Callable[[jax.Array, Context], jax.Array]
M = TypeVar("M", bound=nnx.Module)


class Remat(Protocol):
    """Wrap a layer function with the rematerialisation policy."""

    def __call__(self, layer: Callable[..., Any], *, alone: bool = True) -> Callable[..., Any]:
        """Wrap a layer that is alone in the turn of a loop, or else one that shares a turn or a program with others.

        A compiler that sees several layers would compute their activations again all at once, and one that sees
        forward and backward pass would not compute them again.
        """
        ...


def keep_all(layer: Callable[..., Any], *, alone: bool = True) -> Callable[..., Any]:
    """Return the layer function unchanged, so that nothing is computed again."""
    return layer


class Block(nnx.Module):
    """Transformer block: x + attention(norm(x)), then the same with the MLP.

    With norms after the sums it is norm(x + attention(x)), and with norms of the branches x + norm(attention(norm(x))).
    """

    def __init__(self, key: jax.Array, config: ModelConfig, *, causal: bool = True, dense: bool = False) -> None:
        """Draw the weights of one layer; a dense one has an MLP where others have experts."""
        attention_key, mlp_key = jax.random.split(key)
        self.dropout_rate = config.hidden_dropout
        self.pre_norm = config.norm_placement == "pre"
        self.attention_norm = Norm(config.hidden_size, config)
        self.attention = Attention(attention_key, config, causal=causal)
        self.mlp_norm = Norm(config.hidden_size, config)
        if config.branch_norm:
            self.attention_branch_norm = Norm(config.hidden_size, config)
            self.mlp_branch_norm = Norm(config.hidden_size, config)
        self.mlp = Moe(mlp_key, config) if config.experts and not dense else Mlp(mlp_key, config)

    def __call__(self, x: jax.Array, context: Context) -> tuple[jax.Array, Losses]:
        """Run the block on the residual stream [B, S, D] and return it with the losses that arise inside."""
        return self.residual(x, context, self.attention)

    def residual(self, x: jax.Array, context: Context, attend: Attend) -> tuple[jax.Array, Losses]:
        """Run the block with its attention replaced by `attend` (decoding attends to a cache)."""
        x = checkpoint_name(x, "block_input")
        y = attend(self._branch_input(x, self.attention_norm), context)
        x = self._join(x, y, self.attention_norm, context, "attention_output")
        return self._feed_forward(x, context)

    def _feed_forward(self, x: jax.Array, context: Context) -> tuple[jax.Array, Losses]:
        """Return the residual stream after the MLP, and the losses of a mixture's router."""
        y, losses = self.mlp(self._branch_input(x, self.mlp_norm), context)
        return self._join(x, y, self.mlp_norm, context, "mlp_output"), losses

    def _branch_input(self, x: jax.Array, norm: Norm) -> jax.Array:
        """Return the input of a branch, from the residual stream [B, S, D]."""
        return norm(x) if self.pre_norm else x

    def _join(self, x: jax.Array, y: jax.Array, norm: Norm, context: Context, site: Site) -> jax.Array:
        """Add a branch's output y to the residual stream x, both [B, S, D].

        The sum is tagged before it is normalised. Otherwise, with norms after the sums, their backward pass would
        compute the last product of the branch again, and reduce-scatter it over `tensor` again.
        """
        if hasattr(self, "mlp_branch_norm"):
            y = checkpoint_name(y, "branch_output")  # tagged like the sum, or it would be computed and scattered again
            y = (self.mlp_branch_norm if site == "mlp_output" else self.attention_branch_norm)(y)
        x = x + dropout(y, self.dropout_rate, context.keys, site, context.layout, RESIDUAL)
        x = checkpoint_name(x, "mlp_residual" if site == "mlp_output" else "attention_residual")
        return x if self.pre_norm else norm(x)


def stack_blocks(key: jax.Array, config: ModelConfig, *, causal: bool = True) -> Block:
    """Draw all layers as one Block, whose weights have a leading dimension L; layer i depends on (key, i) alone."""
    return stack_layers(key, config.num_layers, lambda key: Block(key, config, causal=causal))


def stack_layers(key: jax.Array, count: int, layer: Callable[[jax.Array], M]) -> M:
    """Draw `count` modules as one, whose weights have a leading dimension; module i depends on (key, i) alone."""
    return jax.vmap(layer)(jax.vmap(jax.random.fold_in, (None, 0))(key, jnp.arange(count)))


class Units(NamedTuple):
    """The stacked arrays of n layers, divided for a scan over a pattern of p kinds of layers."""

    whole: Any
    """Arrays [n / p, p, ...] of all whole patterns; [n, ...] if there is one kind."""
    rest: Any
    """Arrays [n mod p, ...] of the layers after the last whole pattern, or None."""

    def layers(self, period: int) -> int:
        """Return the number n of layers for a pattern of `period` kinds."""
        whole, rest = (jax.tree.leaves(part) for part in self)
        return whole[0].shape[0] * period + (rest[0].shape[0] if rest else 0)


def in_units(stacked: Any, period: int) -> Units:
    """Divide stacked arrays [n, ...] into whole patterns of `period` layers and a rest, if there is one."""
    if period == 1:
        return Units(stacked, None)
    count = jax.tree.leaves(stacked)[0].shape[0] // period
    whole = jax.tree.map(lambda x: x[: count * period].reshape(count, period, *x.shape[1:]), stacked)
    there = jax.tree.leaves(stacked)[0].shape[0] > count * period
    return Units(whole, jax.tree.map(lambda x: x[count * period :], stacked) if there else None)


def side_by_side(*parts: Units) -> Units:
    """Join several divided trees of the same layers into one, whose leaves are tuples with a leaf of each."""
    whole, rest = zip(*parts, strict=True)
    return Units(whole, None if rest[0] is None else rest)


def joined(units: Units, period: int) -> Any:
    """Return stacked arrays [n, ...] from divided ones, as the inverse of `in_units`."""
    if period == 1:
        return units.whole
    whole = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), units.whole)
    return whole if units.rest is None else jax.tree.map(lambda *parts: jnp.concatenate(parts), whole, units.rest)


def scan_units(
    layers: Sequence[Callable[..., tuple[jax.Array, Any]]], x: jax.Array, units: Units, remat: Remat = keep_all
) -> tuple[jax.Array, Units]:
    """Run layers one after another: a scan with one whole pattern per turn, and then the rest.

    Args:
        layers: one function for each kind, from x and the arrays of a layer to x and the layer's other outputs.
        x: input of the first layer.
        units: stacked arrays, or trees of arrays, of all layers, divided by `in_units`.
        remat: wrapper of a layer with the rematerialisation policy.

    Returns:
        The output x of the last layer, and the other outputs of all layers, divided like `units`.
    """
    if len(layers) == 1:
        only = remat(layers[0])
        x, made = jax.lax.scan(lambda x, inputs: only(x, *inputs), x, units.whole)
        return x, Units(made, None)

    def run(x: jax.Array, unit: Any) -> tuple[jax.Array, Any]:
        made = []
        for place, layer in enumerate(layers[: jax.tree.leaves(unit)[0].shape[0]]):
            # Arrays are taken out of their unit inside the recomputed function; outside, a copy of each would be kept.
            one = lambda x, *unit, at=place, layer=layer: layer(x, *jax.tree.map(partial(_take, at), unit))  # noqa: E731
            x, out = remat(one, alone=False)(x, *unit)
            made.append(out)
        return x, jax.tree.map(lambda *outs: jnp.stack(outs), *made)

    x, whole = jax.lax.scan(run, x, units.whole)
    rest = None
    if units.rest is not None:
        with jax.named_scope("rest"):  # the rest's name in profiles and compiled programs
            x, rest = run(x, units.rest)
    return x, Units(whole, rest)


def _take(place: int, stacked: jax.Array) -> jax.Array:
    """Take one array out of a unit [p, ...] by a split, which no remat policy keeps (see `parallel.remat`)."""
    return jax.lax.split(stacked, (1,) * stacked.shape[0])[place].reshape(stacked.shape[1:])


def run_block(context: Context, x: jax.Array, block: Any, number: jax.Array) -> tuple[jax.Array, Losses]:
    """Run one block of a stack in the context of its kind; `number` is the layer's number in the model."""
    keys = None if context.keys is None else layer_keys(context.keys, number + 1)
    return context.layout.weights(block)(x, context._replace(keys=keys))


def run_blocks(
    blocks: nnx.Module, x: jax.Array, context: Context, remat: Remat = keep_all, first_layer: jax.Array | int = 0
) -> tuple[jax.Array, Losses]:
    """Run stacked blocks one after another in a scan, so that compile time does not grow with depth.

    Args:
        blocks: stacked blocks with a leading dimension L.
        x: residual stream, [B, S, D].
        context: context of the pass, with the keys of the samples.
        remat: wrapper of a layer with the rematerialisation policy.
        first_layer: number of the first of these layers in the model (a decoder's follow its encoder's).

    Returns:
        The output [B, S, D], and the losses that arise inside, summed over the layers.
    """
    return run_units(in_units(blocks, len(context.kinds)), x, context, remat, first_layer)


def run_units(
    units: Units, x: jax.Array, context: Context, remat: Remat = keep_all, first_layer: jax.Array | int = 0
) -> tuple[jax.Array, Losses]:
    """Run blocks that `in_units` has divided (see `run_blocks`)."""
    kinds = context.of_kinds
    numbers = in_units(first_layer + jnp.arange(units.layers(len(kinds))), len(kinds))
    with jax.named_scope("layers"):  # the loop's name in profiles and compiled programs
        x, losses = scan_units(
            [partial(run_block, of_kind) for of_kind in kinds], x, side_by_side(units, numbers), remat
        )
    return x, jax.tree.map(lambda loss: loss.sum(0), joined(losses, len(kinds)))
