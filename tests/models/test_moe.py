"""A mixture of experts, compared with loops over tokens and experts: chosen experts, losses, and no dropped token.

Shapes: B batch, S sequence, D embed, E experts, k experts of a token.
"""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from megajax.config.model import ModelConfig
from megajax.models.context import Context
from megajax.models.experts import block_rows, queue, route, router_losses
from megajax.models.feed_forward import Moe
from megajax.models.layout import Layout
from tests.models import reference
from tests.models.tiny import LLAMA, batch_of, filled, forward, random_model, random_tokens

MIXTURE = replace(LLAMA, experts=5, experts_per_token=2, expert_ffn_size=12)
KINDS = {
    "mixtral": MIXTURE,
    "raw-shares": replace(MIXTURE, router_renormalize=False, experts_per_token=3),
    "shared": replace(MIXTURE, shared_ffn_size=8, shared_gate=True),
    "plain": replace(MIXTURE, activation="gelu", shared_ffn_size=8),
    "all": replace(MIXTURE, experts_per_token=5),
}
B, S, D = 2, 7, 16


def random_moe(config: ModelConfig, seed: int = 0) -> Moe:
    rng = np.random.default_rng(seed)
    return filled(lambda key: Moe(key, config), lambda shape: rng.normal(scale=0.5, size=shape))


def loops(moe: Moe, x: jax.Array) -> jax.Array:
    """[B, S, D] -> [B, S, D], one token and one of its experts at a time, to be differentiated by JAX."""
    c, rows = moe.config, []
    for token in x.reshape(-1, D):
        probabilities = jax.nn.softmax(token @ moe.router[...])
        chosen = np.argsort(-np.asarray(jax.lax.stop_gradient(probabilities)))[: c.experts_per_token]
        whole = sum(probabilities[e] for e in chosen) if c.router_renormalize else 1.0
        row = sum(probabilities[e] / whole * mlp(token, moe.fc1[e], moe.fc2[e], c) for e in chosen)
        if c.shared_ffn_size:
            gate = jax.nn.sigmoid(token @ moe.shared_gate[...]) if c.shared_gate else 1.0
            row += gate * mlp(token, moe.shared.fc1[...], moe.shared.fc2[...], c)
        rows.append(row)
    return jnp.stack(rows).reshape(x.shape)


def mlp(x: jax.Array, fc1: jax.Array, fc2: jax.Array, c: ModelConfig) -> jax.Array:
    hidden = jnp.einsum("d,daf->af", x, fc1)
    first = jax.nn.silu(hidden[0]) * hidden[1] if c.gated else jax.nn.gelu(hidden[0], approximate=True)
    return first @ fc2


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_value_and_gradient_match_loops(kind):
    moe, rng = random_moe(KINDS[kind]), np.random.default_rng(1)
    x, pull = jnp.float32(rng.normal(size=(B, S, D))), jnp.float32(rng.normal(size=(B, S, D)))

    def ours(moe, x):
        return jnp.sum(pull * moe(x, Context(Layout()))[0])

    value, gradients = jax.jit(jax.value_and_grad(ours, argnums=(0, 1)))(moe, x)
    expected, wanted = jax.value_and_grad(lambda moe, x: jnp.sum(pull * loops(moe, x)), argnums=(0, 1))(moe, x)

    np.testing.assert_allclose(value, expected, rtol=1e-5)
    for got, want in zip(jax.tree.leaves(gradients), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5 * np.abs(want).max())


def test_every_token_has_k_different_experts_and_all_are_served():
    """300 tokens, in more blocks than one: each assignment stands in the queue of its expert, once."""
    config = replace(MIXTURE, experts=3)
    x = jnp.float32(np.random.default_rng(0).normal(size=(3, 100, D)))
    routing = route(x, random_moe(config).router[...], config)
    chosen = np.array(routing.experts).reshape(300, 2)
    assert (chosen[:, 0] != chosen[:, 1]).all()
    np.testing.assert_allclose(routing.shares.sum(axis=-1), 1, rtol=1e-6)

    queues = queue(routing.experts, 3, 0)
    assert sorted(np.array(queues.order).tolist()) == list(range(600))
    for expert, (start, end) in enumerate(zip(queues.starts.tolist(), queues.ends.tolist(), strict=True)):
        assert (chosen.reshape(-1)[queues.order[start:end]] == expert).all()
    assert (queues.starts[0], queues.ends[-1]) == (0, 600)


@pytest.mark.slow
def test_nothing_is_dropped_when_all_want_the_same():
    """A router that sends 400 tokens to experts 2 and 0: both queues hold all of them, in several blocks."""
    config = replace(MIXTURE, experts=16)
    moe = random_moe(config)
    moe.router[...] = jnp.zeros((D, 16)).at[0, 2].set(100.0).at[0, 0].set(50.0)
    x = jnp.float32(np.random.default_rng(0).normal(size=(1, 400, D))).at[..., 0].set(1.0)
    assert block_rows(400, config) < 400

    y, _ = jax.jit(lambda moe, x: moe(x, Context(Layout())))(moe, x)

    np.testing.assert_allclose(y, loops(moe, x), rtol=1e-4, atol=1e-4)


def losses_of(logits: np.ndarray, weights: np.ndarray, k: int) -> dict[str, float]:
    config = replace(MIXTURE, experts=logits.shape[-1], experts_per_token=k)
    routing = route(jnp.float32(logits), jnp.eye(logits.shape[-1]), config)
    return {name: float(loss) for name, loss in router_losses(routing, jnp.float32(weights)).items()}


def test_an_undecided_router_has_a_balance_loss_of_one():
    """All probabilities 1/4, whoever wins the ties; the softmax's denominator is 4."""
    losses = losses_of(np.zeros((2, 8, 4)), np.full((2, 8), 1 / 16), k=2)
    assert losses["load_balancing_loss"] == pytest.approx(1, rel=1e-6)
    assert losses["z_loss"] == pytest.approx(np.log(4) ** 2, rel=1e-6)


def test_a_router_that_knows_one_answer_pays_e_over_k():
    """All of 6 tokens to expert 1 of 4, alone: E f P = 4 x 1 x 1; with two experts a token, f halves."""
    logits = np.zeros((1, 6, 4))
    logits[..., 1] = 40.0
    assert losses_of(logits, np.full((1, 6), 1 / 6), k=1)["load_balancing_loss"] == pytest.approx(4, rel=1e-5)
    assert losses_of(logits, np.full((1, 6), 1 / 6), k=2)["load_balancing_loss"] == pytest.approx(2, rel=1e-5)


def test_balance_is_judged_sequence_by_sequence_and_padding_takes_no_part():
    """By hand: sequence 0 sends its two real tokens to experts 0 and 1, sequence 1 both to expert 1, certain of it."""
    logits = np.full((2, 3, 2), -40.0)
    logits[0, [0, 1, 2], [0, 1, 0]] = 40.0
    logits[1, :, 1] = 40.0
    weights = np.array([[0.25, 0.25, 0.0], [0.25, 0.25, 0.0]])
    # 2 (1/2 1/2 + 1/2 1/2) = 1 and 2 (1 1) = 2, half of the weight each.
    assert losses_of(logits, weights, k=1)["load_balancing_loss"] == pytest.approx(1.5, rel=1e-6)


def test_router_is_fp32_under_bf16():
    """Two experts whose logits 256 and 257 are one number in bf16: shares 0.27 and 0.73, not one half each."""
    config = replace(MIXTURE, experts=2)
    x = jnp.array([[[256.0, 1.0]]], jnp.bfloat16)
    routing = route(x, jnp.array([[1.0, 1.0], [0.0, 1.0]], jnp.bfloat16), config)
    assert routing.experts[0, 0].tolist() == [1, 0]
    np.testing.assert_allclose(routing.shares[0, 0], [0.731059, 0.268941], rtol=1e-5)


@pytest.mark.parametrize("dense", [0, 2])
def test_a_model_of_mixtures_matches_loops(dense):
    """Logits of two layers with experts, behind dense ones or not; the experts' loop stands for the reference's MLP."""
    count = MIXTURE.num_layers
    config = replace(MIXTURE, num_layers=dense + count, dense_layers=dense, ffn_hidden_size=20, expert_ffn_size=24)
    model, tokens = random_model(config), random_tokens(2, 7)
    blocks = [jax.tree.map(lambda w, i=i: w[i], model.blocks) for i in range(count)]
    seen, mlp = iter(blocks[i].mlp for _ in range(2) for i in range(count)), reference.mlp

    def expert_loops(x: np.ndarray, w: dict, activation: str) -> np.ndarray:
        if "mlp.router" not in w:
            return mlp(x, w, activation)
        return np.asarray(loops(next(seen), jnp.float32(x)), np.float64)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reference, "mlp", expert_loops)
        expected = reference.logits(model, tokens)
    np.testing.assert_allclose(forward(model, batch_of(tokens)), expected, rtol=1e-4, atol=1e-4)
