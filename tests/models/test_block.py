"""Stacked blocks are the blocks one after the other, in a program that does not grow with them."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np

from megajax.models.block import Block, run_blocks, stack_blocks
from megajax.models.context import Context
from megajax.models.gpt import Gpt
from megajax.models.layout import Layout
from tests.models.tiny import GPT, batch_of, random_model, random_tokens


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


def test_stack_has_the_structure_of_a_block():
    """One leading dimension of size L more, and nothing else."""
    key = jax.random.key(0)
    one = jax.eval_shape(lambda: Block(key, GPT))
    stacked = jax.eval_shape(lambda: stack_blocks(key, replace(GPT, num_layers=5)))
    assert jax.tree.structure(one) == jax.tree.structure(stacked)
    for single, many in zip(jax.tree.leaves(one), jax.tree.leaves(stacked), strict=True):
        assert many.shape == (5, *single.shape)


def test_program_does_not_grow_with_depth(config):
    """Case X03: loss and gradients of 4 and of 32 layers are programs of as many lines."""
    batch = batch_of(random_tokens(2, 8), labels=random_tokens(2, 8, seed=1), weights=np.ones((2, 8), np.float32))

    def lines(layers):
        def loss(model):
            return model.losses(batch, model.context(batch, Layout(), keys=None))["lm loss"]

        deep = replace(config, num_layers=layers)
        model = jax.eval_shape(lambda: Gpt(jax.random.key(0), deep))
        return jax.jit(jax.value_and_grad(loss)).lower(model).as_text().count("\n")

    assert lines(4) == lines(32)
