"""A mixture of experts computes the same under every kind of layout as on one device, and sends what its docstring
says.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from megajax.config import InputError, OptimConfig, ParallelConfig, check_config
from megajax.config.parallel import AXES as MESH_AXES
from megajax.models.experts import Weights, mixture
from megajax.parallel.experts import Experts
from megajax.parallel.mesh import MANUAL_AXES, build_mesh
from megajax.parallel.rules import Rules
from megajax.planning.equivalence import compare
from megajax.planning.layouts import layout_name, legal_layouts
from tests.harness import LLAMA, Outcome, tiny_config, train_layout

pytestmark = pytest.mark.slow

MIXTURE = replace(
    LLAMA, num_layers=2, experts=4, expert_ffn_size=32, shared_ffn_size=32, shared_gate=True, balance_loss=0.1,
    z_loss=0.1,
)  # fmt: skip
MODELS = {"mixture": MIXTURE, "dense": replace(MIXTURE, num_layers=3, dense_layers=1, ffn_hidden_size=64)}
OPTIM = OptimConfig(lr=1e-3, decay_style="constant", weight_decay=0.1)
LAYOUTS = {
    "dense fsdp-2 expert-2 tensor-2": ({"fsdp": 2, "expert": 2, "tensor": 2}, 2),
    "data-2 expert-2 tensor-2": ({"data": 2, "expert": 2, "tensor": 2}, 1),
    "expert-4 tensor-2 no-sequence-parallel": ({"expert": 4, "tensor": 2, "sequence_parallel": False}, 1),
    "fsdp-2 expert-2 context-2": ({"fsdp": 2, "expert": 2, "context": 2}, 2),
    "data-2 fsdp-2 expert-2 zero": ({"data": 2, "fsdp": 2, "expert": 2, "zero": 1}, 1),
    "pipe-2 expert-2 tensor-2": ({"pipe": 2, "expert": 2, "tensor": 2}, 2),
}


@pytest.fixture(scope="module")
def reference() -> dict[str, Outcome]:
    """Each model on one device."""
    return {
        name: train_layout(tiny_config(model, 8, optim=OPTIM), ParallelConfig(data=1)) for name, model in MODELS.items()
    }


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_computes_the_same(reference: dict[str, Outcome], layout: str) -> None:
    """Initial weights bit-equal, gradients within 1e-5, losses within 5e-6; both router losses take part in them."""
    sizes, micro = LAYOUTS[layout]
    kind = "dense" if layout.startswith("dense") else "mixture"
    outcome = train_layout(tiny_config(MODELS[kind], micro, optim=OPTIM), ParallelConfig(**({"data": 1} | sizes)))
    assert compare(outcome, reference[kind]).departures == ()


def on_mesh(sizes: dict[str, int], sequence_parallel: bool = True) -> Experts:
    mesh = build_mesh(dict.fromkeys(MESH_AXES, 1) | sizes, jax.devices()[: int(np.prod(list(sizes.values())))])
    return Experts(Rules(mesh, sequence_parallel))


@pytest.mark.parametrize("sequence_parallel", [True, False])
def test_outputs_losses_and_gradients_of_one_mixture(sequence_parallel: bool) -> None:
    """On expert 2 x tensor 2 x context 2, with tokens that carry no weight and a cotangent for every output."""
    config = replace(MIXTURE, hidden_size=8, num_heads=2)
    rng = np.random.default_rng(0)
    draw = lambda *shape: jnp.float32(rng.normal(size=shape))  # noqa: E731
    x, pull = draw(4, 8, 8), draw(4, 8, 8)
    weights = Weights(draw(8, 4), draw(4, 8, 2, 6), draw(4, 6, 8))
    token_weights = jnp.float32(rng.random((4, 8)) * (rng.random((4, 8)) < 0.7))
    experts = on_mesh({"expert": 2, "context": 2, "tensor": 2}, sequence_parallel)

    def objective(apply, x, weights):
        y, losses = apply(x, weights, token_weights, config)
        return jnp.sum(pull * y) + 2 * losses["load_balancing_loss"] + 3 * losses["z_loss"], losses

    def run(apply, x, weights):
        return jax.value_and_grad(partial(objective, apply), argnums=(0, 1), has_aux=True)(x, weights)

    everywhere = PartitionSpec()
    inside = jax.shard_map(
        partial(run, experts), mesh=experts.rules.mesh, in_specs=everywhere, out_specs=everywhere,
        axis_names=set(MANUAL_AXES), check_vma=False,
    )  # fmt: skip
    got, want = jax.jit(inside)(x, weights), jax.jit(partial(run, mixture))(x, weights)
    for ours, theirs in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-5 * float(jnp.abs(theirs).max()))


def test_what_a_layer_sends() -> None:
    """Over `expert`, per layer and microbatch: tokens gathered once forward, twice backward, sums scattered once each.

    Their numbers [e B, S, D]; experts and shares of the tokens travel beside, [e B, S, k].
    """
    model = replace(MIXTURE, num_layers=3, shared_ffn_size=0, shared_gate=False)
    outcome = train_layout(tiny_config(model, 2, optim=OPTIM), ParallelConfig(data=1, expert=2), steps=1)
    microbatches, layers, tokens = 2, 3, (4, 16, 64)
    inside = outcome.traffic.over("expert").inside(microbatches, layers).where(lambda c: c.shape == tokens)
    passes = microbatches * layers
    assert inside.forward().count("all-gather") == passes
    assert inside.forward().count("reduce-scatter") == passes
    assert inside.backward().count("all-gather") == 2 * passes
    assert inside.backward().count("reduce-scatter") == passes
    assert len(inside) == 5


def test_legal_layouts_shard_experts() -> None:
    names = [layout_name(layout) for layout in legal_layouts(tiny_config(MIXTURE), 2)]
    assert "expert=2 remat=selective microbatches=4" in names
    assert not any("expert" in layout_name(layout) for layout in legal_layouts(tiny_config(LLAMA), 2))


@pytest.mark.parametrize(
    ("model", "parallel", "message"),
    [
        ({"experts": 0}, {}, "model.expert_ffn_size is 32 without model.experts"),
        ({}, {"expert": 3}, "model.experts 4 is not a multiple of parallel.expert 3"),
        ({"expert_ffn_size": 33}, {"tensor": 2}, "model.expert_ffn_size 33 is not a multiple of parallel.tensor 2"),
        ({"shared_ffn_size": 33}, {"tensor": 2}, "model.shared_ffn_size 33 is not a multiple of parallel.tensor 2"),
        ({"experts_per_token": 5}, {}, "model.experts_per_token 5 exceeds model.experts 4"),
        ({"shared_ffn_size": 0}, {}, "model.shared_gate is true without model.shared_ffn_size"),
        ({"dense_layers": 2}, {}, "model.dense_layers 2 leaves no layer of model.num_layers 2 to experts"),
        ({"dense_layers": 1}, {"pipe": 2}, "parallel.pipe=2: all stages run the same program, but model.dense_layers"),
        ({"dense_layers": 1, "ffn_hidden_size": 33}, {"tensor": 2}, "model.ffn_hidden_size 33 is not a multiple"),
        (
            {"dense_layers": 1, "window": 4, "layer_pattern": ("local", "global")},
            {},
            "goes without model.layer_pattern",
        ),
        ({"bias": True}, {}, "model.experts goes without biases: set model.bias=false"),
    ],
)
def test_what_does_not_fit_together(model: dict, parallel: dict, message: str) -> None:
    with pytest.raises(InputError, match=message):
        check_config(tiny_config(replace(MIXTURE, **model), parallel=ParallelConfig(data=1, **parallel)))


def test_a_dense_model_has_no_experts_to_shard() -> None:
    with pytest.raises(InputError, match=r"parallel.expert=2 shards experts: set model.experts"):
        check_config(tiny_config(LLAMA, parallel=ParallelConfig(data=1, expert=2)))
