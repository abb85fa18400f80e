"""Stacked blocks compute the blocks one after another, in a program that does not grow with their number."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from megajax.models.block import Block, in_units, run_blocks, run_units, stack_blocks
from megajax.models.context import Context
from megajax.models.gpt import Gpt
from megajax.models.layout import Layout
from megajax.parallel.remat import remat_policy
from tests.models.tiny import GEMMA, GPT, batch_of, random_model, random_tokens


@jax.jit
def one_block(block, x):
    return block(x, Context(Layout()))[0]


def test_scan_runs_one_block_after_the_other():
    blocks = random_model(GPT).blocks
    x = jnp.float32(np.random.default_rng(0).normal(size=(2, 5, 16)))

    y = jax.jit(lambda blocks, x: run_blocks(blocks, x, Context(Layout()))[0])(blocks, x)

    for number in range(GPT.num_layers):
        x = one_block(jax.tree.map(lambda w, number=number: w[number], blocks), x)
    np.testing.assert_allclose(y, x, rtol=1e-5, atol=1e-5)


def test_pattern_keeps_no_copy_of_the_weights():
    """The backward pass of layers in a pattern keeps the stacked weights themselves, and beside them activations only:
    as many bytes as one that has no pattern.
    """

    def kept(config, policy):
        model = jax.eval_shape(lambda: Gpt(jax.random.key(0), config))
        batch = batch_of(random_tokens(2, 4), labels=random_tokens(2, 4), weights=np.ones((2, 4), np.float32))

        def residuals(blocks, x):
            context = random_model(config).context(batch, Layout(), keys=None)
            units = in_units(blocks, len(context.kinds))
            run = partial(run_units, context=context, remat=remat_policy(policy))
            leaves = jax.tree.leaves(jax.vjp(run, units, x)[1])
            known = [*jax.tree.leaves(units), *jax.tree.leaves(context.kinds)]
            return [leaf for leaf in leaves if not any(leaf is other for other in known)]

        x = jax.ShapeDtypeStruct((2, 4, 16), jnp.float32)
        made = jax.eval_shape(residuals, model.blocks, x)
        return sum(leaf.size for leaf in made if leaf.size > 4 * 4 * 4)

    plain = replace(GEMMA, layer_pattern=(), rope_local_base=None)
    for policy in ("none", "selective", "full"):
        assert 0 < kept(GEMMA, policy) <= kept(plain, policy)


def test_gradients_of_a_pattern_that_breaks_off():
    """Five layers of two kinds, of which the last runs beside the loop, against one layer after the other: outputs and
    gradients, whatever is computed again.
    """
    config = replace(GEMMA, num_layers=5)
    model, x = random_model(config), jnp.float32(np.random.default_rng(0).normal(size=(2, 6, 16)))
    context = model.context(batch_of(random_tokens(2, 6)), Layout(), keys=None)

    def in_turn(blocks, x):
        for number in range(5):
            block = jax.tree.map(lambda w, number=number: w[number], blocks)
            x, _ = block(x, context.of_kinds[number % 2])
        return x

    def pulled(run):
        def out_and_gradients(blocks, x):
            out, pull = jax.vjp(run, blocks, x)
            return out, pull(jnp.cos(out))

        return jax.jit(out_and_gradients)(model.blocks, x)

    expected = pulled(in_turn)
    for policy in ("none", "selective", "full"):
        run = lambda blocks, x, policy=policy: run_blocks(blocks, x, context, remat_policy(policy))[0]  # noqa: E731
        found = pulled(run)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-4, atol=2e-4), found, expected)


def test_barriers_keep_recomputation_apart_where_layers_share_a_turn():
    """Two layers of a pattern have one each, and one that breaks it off; a layer alone in its turn needs none."""

    def barriers(config):
        context = random_model(config).context(batch_of(random_tokens(2, 6)), Layout(), keys=None)
        blocks = jax.eval_shape(lambda: Gpt(jax.random.key(0), config)).blocks
        loss = lambda blocks, x: run_blocks(blocks, x, context, remat_policy("full"))[0].sum()  # noqa: E731
        x = jax.ShapeDtypeStruct((2, 6, 16), jnp.float32)
        return jax.jit(jax.grad(loss)).lower(blocks, x).as_text().count("optimization_barrier")

    deep = [replace(GEMMA, num_layers=layers) for layers in (4, 5)]
    assert [barriers(config) for config in (*deep, replace(GPT, num_layers=4))] == [2, 3, 0]


def test_stack_has_the_structure_of_a_block():
    """One leading dimension of size L more, and nothing else."""
    key = jax.random.key(0)
    one = jax.eval_shape(lambda: Block(key, GPT))
    stacked = jax.eval_shape(lambda: stack_blocks(key, replace(GPT, num_layers=5)))
    assert jax.tree.structure(one) == jax.tree.structure(stacked)
    for single, many in zip(jax.tree.leaves(one), jax.tree.leaves(stacked), strict=True):
        assert many.shape == (5, *single.shape)


def test_program_does_not_grow_with_depth(config):
    """Loss and gradients of 4 and of 32 layers are programs of as many lines."""
    batch = batch_of(random_tokens(2, 8), labels=random_tokens(2, 8, seed=1), weights=np.ones((2, 8), np.float32))

    def lines(layers):
        def loss(model):
            return model.losses(batch, model.context(batch, Layout(), keys=None))["lm loss"]

        deep = replace(config, num_layers=layers)
        model = jax.eval_shape(lambda: Gpt(jax.random.key(0), deep))
        return jax.jit(jax.value_and_grad(loss)).lower(model).as_text().count("\n")

    assert lines(4) == lines(32)
