"""The pipeline executor: its results, the activations that it keeps, and that nothing from the bubble reaches a result.

Shapes: P stages, v chunks, n layers of a chunk on a stage, M microbatches, B samples of a microbatch, S sequence, D
embed.
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cache
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from megajax.config import LossScaleConfig, ParallelConfig, TrainConfig, resolve_mesh
from megajax.models.gpt import Gpt
from megajax.models.parameters import split_layers
from megajax.parallel.mesh import build_mesh
from megajax.parallel.pipeline.schedule import Interleaved1F1B
from megajax.parallel.rules import Rules
from megajax.parallel.run import Runner
from megajax.planning.equivalence import random_batch
from tests.harness import BATCH, GPT, Outcome, gathered, tiny_config, train_layout, worst

MODEL = replace(GPT, num_layers=4, hidden_size=32, num_heads=4)
S, D, F, N, H, LAYERS = 16, 32, 128, 4, 8, 4


class Pipeline(NamedTuple):
    """Sizes of a schedule."""

    stages: int
    chunks: int
    microbatches: int


ONE_DEVICE = Pipeline(1, 1, 1)
PIPELINES = [
    Pipeline(2, 1, 4),
    Pipeline(2, 2, 2),
    Pipeline(4, 1, 2),  # the pipeline is never full
]


def prepare(sizes: Pipeline, **options: Any) -> tuple[Runner, tuple[Any, ...]]:
    """A runner on its mesh and what it takes: model, batch, step."""
    parallel = ParallelConfig(pipe=sizes.stages, data=1)
    rules = Rules(build_mesh(resolve_mesh(parallel, sizes.stages), jax.devices()[: sizes.stages]))
    model = split_layers(Gpt(jax.random.key(0), MODEL), sizes.chunks)
    host = random_batch(tiny_config(MODEL), step=0)
    host["loss_mask"][: BATCH // 4] = 0  # with four microbatches the first has no token that counts
    batch = {name: array.reshape(sizes.microbatches, -1, *array.shape[1:]) for name, array in host.items()}
    batch["weights"] = batch["loss_mask"]
    return Runner(rules, "xla", chunks=sizes.chunks, **options), (model, batch, jnp.int32(0))


@cache
def loss_and_gradients(sizes: Pipeline, poison: bool = False) -> tuple[float, dict[str, np.ndarray]]:
    """Both, on the host, layers in one stack."""
    runner, arguments = prepare(sizes, poison=poison)
    losses, gradients = jax.jit(runner.losses_and_gradients)(*arguments)
    return float(losses["lm loss"]), gathered(gradients)


@pytest.mark.slow
@pytest.mark.parametrize("sizes", PIPELINES)
def test_computes_what_one_device_computes(sizes: Pipeline) -> None:
    """Also where a microbatch has no token that counts, and where there are fewer microbatches than stages."""
    (loss, gradients), (one_loss, one) = loss_and_gradients(sizes), loss_and_gradients(ONE_DEVICE)
    assert loss == pytest.approx(one_loss, rel=1e-6)
    assert gradients.keys() == one.keys()
    assert worst(gradients, one)[0] < 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("sizes", PIPELINES[1:])
def test_the_bubble_reaches_no_result(sizes: Pipeline) -> None:
    """With nan in every masked slot loss and gradients are finite and the same."""
    (loss, gradients), (clean_loss, clean) = loss_and_gradients(sizes, poison=True), loss_and_gradients(sizes)
    assert loss == pytest.approx(clean_loss, rel=1e-6)
    assert all(np.isfinite(gradient).all() for gradient in gradients.values())
    assert worst(gradients, clean)[0] < 1e-6


@pytest.mark.parametrize("sizes", PIPELINES[:2])
def test_the_forward_pass_alone_has_the_same_loss(sizes: Pipeline) -> None:
    runner, (model, batch, _) = prepare(sizes)
    loss = jax.jit(runner.losses)(model, batch)["lm loss"]
    assert float(loss) == pytest.approx(loss_and_gradients(sizes)[0], rel=1e-6)


def kept(sizes: Pipeline, remat: Any) -> list[tuple[int, ...]]:
    """Shapes of what a forward slot keeps for the backward slot, the ring's places in front."""
    runner, arguments = prepare(sizes, remat=remat)
    shapes = []

    def start(*arguments: Any) -> jax.Array:
        flow = runner._executor(*arguments)._start(training=True)
        shapes.extend(leaf.shape for leaf in jax.tree.leaves(flow.ring))
        return jnp.float32(0)

    jax.eval_shape(runner._manual(start, arguments[0], PartitionSpec()), *arguments)
    return shapes


NAMED = {
    "block_input": (S, D),
    "attention_residual": (S, D),
    "qkv": (S, N, 3, H),
    "attention_out": (S, N, H),
    "mlp_hidden": (S, 1, F),
}


@pytest.mark.parametrize("sizes", PIPELINES[:2])
@pytest.mark.parametrize(
    ("remat", "names"),
    [("full", ["block_input"]), (("qkv",), ["block_input", "qkv"]), ("selective", list(NAMED))],
)
def test_kept_is_what_the_policy_names(sizes: Pipeline, remat: Any, names: list[str]) -> None:
    """And the input of every layer, which its recomputation starts from. Beside activations, at most places [S]."""
    n, B = LAYERS // (sizes.stages * sizes.chunks), BATCH // sizes.microbatches
    places = Interleaved1F1B(*sizes).ring_slots
    shapes = kept(sizes, remat)
    activations = [shape for shape in shapes if shape[1:3] == (n, B)]
    assert sorted(activations) == sorted((places, n, B, *NAMED[name]) for name in names)
    assert sum(map(math.prod, shapes)) - sum(map(math.prod, activations)) <= 2 * places * S


def test_no_mask_is_kept() -> None:
    """Without any recomputation neither: who sees whom is the same for all samples, and follows from places [S]."""
    sizes = PIPELINES[0]
    n, B = LAYERS // (sizes.stages * sizes.chunks), BATCH // sizes.microbatches
    others = [shape[1:] for shape in kept(sizes, "none") if n not in shape[1:2]]
    assert all(math.prod(shape) <= 2 * S for shape in others), others
    assert [shape for shape in kept(sizes, "none") if shape[1:3] == (n, B) and shape[-2:] == (S, S)], "but scores are"


def test_weights_are_never_kept() -> None:
    """Without any recomputation all kinds of activations are, but no weight, flattened or not."""
    shapes = kept(PIPELINES[0], "none")
    assert len(shapes) > len(NAMED)
    weights = [leaf.shape[1:] for leaf in jax.tree.leaves(Gpt(jax.random.key(0), MODEL).blocks)]
    flattened = {(math.prod(dims[:at]), math.prod(dims[at:])) for dims in weights for at in range(1, len(dims))}
    assert not [shape for shape in shapes if shape[2:] in flattened.union(weights)]


def train_fp16(scale: float) -> Outcome:
    """Two steps on two stages."""
    train = TrainConfig(steps=5, global_batch_size=BATCH, micro_batch_size=2, precision="fp16")
    config = replace(tiny_config(MODEL, train=train), loss_scale=LossScaleConfig(initial=scale))
    return train_layout(config, ParallelConfig(pipe=2, data=1), steps=2)


@pytest.mark.slow
def test_fp16_with_a_loss_scale() -> None:
    """Losses and gradients are those of fp32, as far as fp16 can tell."""
    half, full = train_fp16(2.0**8), train_layout(tiny_config(MODEL, 2), ParallelConfig(pipe=2, data=1), steps=2)
    np.testing.assert_allclose(half.losses, full.losses, rtol=2e-3)
    assert worst(half.first_gradients, full.first_gradients)[0] < 0.05


@pytest.mark.slow
def test_an_overflow_on_any_stage_skips_the_step_on_all() -> None:
    outcome = train_fp16(2.0**40)
    assert np.isfinite(outcome.losses).all()
    assert not np.isfinite(outcome.norms).any()
    for name, value in outcome.final.items():
        if name.startswith("params."):
            np.testing.assert_array_equal(value, outcome.initial[name], err_msg=name)
