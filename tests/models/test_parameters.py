"""Names, logical axes and roles of parameters, in a model and in trees that hold copies of it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from megajax.models.block import Block
from megajax.models.gpt import Gpt
from megajax.models.parameters import annotate, cast, logical_axes, named_leaves, roles
from megajax.training.optimizer import DECAYED_ROLES
from tests.models.tiny import GPT, LLAMA, random_model

GPT_AXES = {
    "blocks.attention.out": ("layers", "heads", "head_dim", "embed"),
    "blocks.attention.out_bias": ("layers", "norm"),
    "blocks.attention.qkv": ("layers", "embed", "kv_heads", "qkv_in_group", "head_dim"),
    "blocks.attention.qkv_bias": ("layers", "kv_heads", "qkv_in_group", "head_dim"),
    "blocks.attention_norm.bias": ("layers", "norm"),
    "blocks.attention_norm.scale": ("layers", "norm"),
    "blocks.mlp.fc1": ("layers", "embed", "gate_up", "mlp"),
    "blocks.mlp.fc1_bias": ("layers", "gate_up", "mlp"),
    "blocks.mlp.fc2": ("layers", "mlp", "embed"),
    "blocks.mlp.fc2_bias": ("layers", "norm"),
    "blocks.mlp_norm.bias": ("layers", "norm"),
    "blocks.mlp_norm.scale": ("layers", "norm"),
    "final_norm.bias": ("norm",),
    "final_norm.scale": ("norm",),
    "position_embedding": ("positions", "embed"),
    "word_embedding": ("vocab", "embed"),
}
DECAYED = ["blocks.attention.out", "blocks.attention.qkv", "blocks.mlp.fc1", "blocks.mlp.fc2"]


def abstract(make):
    return jax.eval_shape(make, jax.random.key(0))


def decayed(module):
    """Names of the parameters that weight decay shrinks."""
    names = [name for name, _ in named_leaves(module)]
    return [name for name, role in zip(names, jax.tree.leaves(roles(module)), strict=True) if role in DECAYED_ROLES]


def test_names_and_axes():
    """A parameter that is stacked by layer has "layers" in front."""
    model = abstract(lambda key: Gpt(key, GPT))
    assert {name: logical_axes(param) for name, param in named_leaves(model)} == GPT_AXES


@pytest.mark.parametrize(
    ("config", "tables"), [(GPT, ["position_embedding", "word_embedding"]), (LLAMA, ["head", "word_embedding"])]
)
def test_only_matrices_and_embeddings_decay(config, tables):
    """No norm and no bias, whatever it is called, and the same in one block as in the stacked ones."""
    assert decayed(abstract(lambda key: Gpt(key, config))) == DECAYED + tables
    assert [f"blocks.{name}" for name in decayed(abstract(lambda key: Block(key, config)))] == DECAYED


def test_trees_that_hold_the_model():
    """Gradients and moments keep names and axes; a scalar has no axes."""
    model = abstract(lambda key: Gpt(key, GPT))
    state = {"moments": (model, jax.tree.map(jnp.zeros_like, model)), "step": jnp.int32(3)}

    axes = {name: logical_axes(leaf) for name, leaf in named_leaves(state)}

    copies = {f"moments.{i}.{name}": names for i in (0, 1) for name, names in GPT_AXES.items()}
    assert axes == copies | {"step": ()}


def test_annotate_keeps_the_structure():
    model = abstract(lambda key: Gpt(key, LLAMA))
    sizes = annotate(model, lambda name, param: (name, param.shape))
    assert isinstance(sizes, Gpt)
    assert sizes.blocks.mlp.fc2.get_value() == ("blocks.mlp.fc2", (2, 24, 16))
    assert roles(model).final_norm.scale.get_value() == "norm"


def test_cast_keeps_names_and_roles():
    model = random_model(LLAMA)
    half = cast(model, jnp.bfloat16)
    for (name, before), (same_name, after) in zip(named_leaves(model), named_leaves(half), strict=True):
        assert isinstance(after, nnx.Param)
        assert (name, before.role, logical_axes(before)) == (same_name, after.role, logical_axes(after))
        assert (before.dtype, after.dtype) == (jnp.float32, jnp.bfloat16)
        np.testing.assert_allclose(np.float32(after[...]), before[...], rtol=2**-8)
