"""Update rules, compared with formulas in NumPy, and the choice of decayed parameters, clipping and skipping.

Shapes: L layers, D embed, N heads, K kv heads, G query heads per kv head, H head dim, F mlp, V vocab.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from megajax.config import load_config
from megajax.config.model import ModelConfig
from megajax.config.parallel import AXES
from megajax.config.train import OptimConfig
from megajax.models.families import build_model
from megajax.models.parameters import annotate
from megajax.models.parameters import named_leaves as names_and_leaves
from megajax.parallel.mesh import build_mesh
from megajax.parallel.rules import Rules
from megajax.planning.collectives import collectives
from megajax.training.optimizer import apply_update, build_optimizer, clip_by_global_norm, global_norm
from megajax.training.state import optimizer_for
from megajax.training.step import build_init
from tests.models.tiny import filled

L, D, F, K, G, H, V = 2, 8, 12, 2, 2, 4, 10
RULES = ("adamw", "sgd", "lion", "muon")


def normal(rng, *shape):
    return jnp.asarray(rng.normal(size=shape), jnp.float32)


class Block(nnx.Module):
    """The weights of L stacked blocks (or of one, with `layers=()`), as the models declare them."""

    def __init__(self, rng, *, layers=(L,), bias=True, swiglu=False):
        def param(shape, axes, role):
            return nnx.Param(normal(rng, *layers, *shape), axes=axes, role=role)

        hidden, hidden_axes = ((2, F), ("gate_up", "mlp")) if swiglu else ((F,), ("mlp",))
        self.norm = param((D,), ("embed",), "norm")
        self.qkv = param((D, K, G + 2, H), ("embed", "kv_heads", "qkv_in_group", "head_dim"), "matrix")
        self.out = param((K * G, H, D), ("heads", "head_dim", "embed"), "matrix")
        self.up = param((D, *hidden), ("embed", *hidden_axes), "matrix")
        self.down = param((F, D), ("mlp", "embed"), "matrix")
        if bias:
            self.up_bias = param(hidden, hidden_axes, "bias")


class Model(nnx.Module):
    """Embedding, blocks and final norm."""

    def __init__(self, seed=0, *, layers=(L,), **switches):
        rng = np.random.default_rng(seed)
        self.embedding = nnx.Param(normal(rng, V, D), axes=("vocab", "embed"), role="embedding")
        self.blocks = Block(rng, layers=layers, **switches)
        self.final_norm = nnx.Param(normal(rng, D), axes=("embed",), role="norm")


def metadata(model, name):
    """Tree of the parameters with one metadata field as leaves."""
    is_param = lambda x: isinstance(x, nnx.Variable)  # noqa: E731
    return jax.tree.map(lambda p: p.replace(getattr(p, name)), model, is_leaf=is_param)


def build(model, **config):
    return build_optimizer(OptimConfig(**config), metadata(model, "role"), metadata(model, "axes"))


def named_leaves(tree):
    return {jax.tree_util.keystr(path): np.array(x) for path, x in jax.tree_util.tree_leaves_with_path(tree)}


def run(optimizer, params, *gradients, lr=0.1):
    """Parameters and state after one step per gradient."""
    state = optimizer.init(params)
    step = jax.jit(partial(apply_update, optimizer=optimizer))
    for grads in gradients:
        params, state = step(params, state, grads, jnp.float32(lr), skip=jnp.bool_(False))
    return params, state


def newton_schulz(m):
    """Five quintic iterations towards the orthogonal factor of m (Jordan 2024), in the wide orientation."""
    x = m.T if m.shape[0] > m.shape[1] else m
    x = x / (np.linalg.norm(x) + 1e-8)
    for _ in range(5):
        a = x @ x.T
        x = 3.4445 * x + (-4.7750 * a + 2.0315 * a @ a) @ x
    return x.T if m.shape[0] > m.shape[1] else x


def muon_direction(g, matrix_shape):
    """The update of one matrix, brought to a root mean square of about 0.2."""
    matrix = g.reshape(matrix_shape)
    return (0.2 * max(matrix.shape) ** 0.5 * newton_schulz(matrix)).reshape(g.shape)


def reference(rule, g1, g2, p, wd, matrix_shape):
    """Parameter after two steps with learning rate 0.1, by the book, in float64."""
    g1, g2, p = (np.asarray(x, np.float64) for x in (g1, g2, p))
    m = v = np.zeros_like(p)
    for t, g in enumerate((g1, g2), start=1):
        if rule == "adamw":
            m, v = 0.9 * m + 0.1 * g, 0.99 * v + 0.01 * g**2
            u = (m / (1 - 0.9**t)) / (np.sqrt(v / (1 - 0.99**t)) + 1e-8)
        elif rule == "sgd":
            m = 0.95 * m + g
            u = m
        elif rule == "lion":
            u = np.sign(0.9 * m + 0.1 * g)
            m = 0.99 * m + 0.01 * g
        else:
            m = 0.95 * m + 0.05 * g
            nesterov = 0.95 * m / (1 - 0.95 ** (t + 1)) + 0.05 * g / (1 - 0.95**t)
            u = muon_direction(nesterov, matrix_shape)
        p = p - 0.1 * (u + wd * p)
    return p


@pytest.mark.parametrize("rule", RULES)
def test_two_steps_of_each_rule_on_stacked_blocks(rule):
    model, g1, g2 = Model(0), Model(1), Model(2)
    own = {"adamw": {"beta2": 0.99}, "sgd": {"momentum": 0.95}, "lion": {"beta2": 0.99}}
    optimizer = build(model, name=rule, weight_decay=0.1, **own.get(rule, {"beta2": 0.99, "momentum": 0.95}))
    after, _ = run(optimizer, model, g1, g2)

    # Part of the weight, and its shape as a matrix.
    whole, q, k, v = ..., np.s_[:, :, :G], np.s_[:, :, G], np.s_[:, :, G + 1]
    matrices = [("qkv", q, (D, K * G * H)), ("qkv", k, (D, K * H)), ("qkv", v, (D, K * H))]
    matrices += [("out", whole, (K * G * H, D)), ("up", whole, (D, F)), ("down", whole, (F, D))]
    for name, part, shape in matrices:
        for layer in range(L):
            args = (np.asarray(getattr(tree.blocks, name)[layer])[part] for tree in (g1, g2, model))
            expected = reference(rule, *args, wd=0.1, matrix_shape=shape)
            got = np.asarray(getattr(after.blocks, name)[layer])[part]
            np.testing.assert_allclose(got, expected, rtol=2e-4, atol=2e-5)

    other = "adamw" if rule == "muon" else rule
    for get, wd in ((lambda m: m.embedding, 0.1), (lambda m: m.final_norm, 0.0), (lambda m: m.blocks.up_bias, 0.0)):
        expected = reference(other, get(g1)[...], get(g2)[...], get(model)[...], wd, None)
        np.testing.assert_allclose(get(after)[...], expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("rule", ["adamw", "muon"])
def test_stacked_layers_train_like_separate_ones(rule):
    stacked, grads = Model(0), Model(1)
    after, _ = run(build(stacked, name=rule), stacked, grads)
    one, one_grads = Model(0, layers=()), Model(0, layers=())
    step_of_one = partial(run, build(one, name=rule))
    for layer in range(L):
        take = partial(jax.tree.map, lambda x, layer=layer: x[layer])
        leaves = jax.tree.leaves(take(stacked.blocks)), jax.tree.leaves(take(grads.blocks))
        one.blocks, one_grads.blocks = (jax.tree.unflatten(jax.tree.structure(one.blocks), x) for x in leaves)
        one_after, _ = step_of_one(one, one_grads)
        for name, value in named_leaves(one_after.blocks).items():
            np.testing.assert_allclose(value, named_leaves(after.blocks)[name][layer], rtol=1e-5, atol=1e-6)


GPT_DECAYED = {".embedding.value", ".blocks.qkv.value", ".blocks.out.value", ".blocks.up.value", ".blocks.down.value"}


@pytest.mark.parametrize("layers", [(), (L,), (1, 2, 1)], ids=["unstacked", "stacked", "pipeline"])
@pytest.mark.parametrize("switches", [{}, {"bias": False, "swiglu": True}], ids=["gpt", "llama"])
def test_only_matrices_and_embeddings_are_decayed(switches, layers):
    """The documented rule, read off from what a zero gradient does; the same stacked and unstacked."""
    model = Model(layers=layers, **switches)
    after, _ = run(build(model, weight_decay=0.5), model, jax.tree.map(jnp.zeros_like, model), lr=0.5)
    before, after = named_leaves(model), named_leaves(after)
    decayed = {name for name in before if not np.array_equal(before[name], after[name])}
    assert decayed == GPT_DECAYED
    for name in decayed:
        np.testing.assert_allclose(after[name], 0.75 * before[name], rtol=1e-6)


def test_state_is_flat_and_has_the_parameters_tree():
    model = Model()
    state = build(model, name="adamw").init(model)
    assert isinstance(state, optax.ScaleByAdamState)
    assert jax.tree.structure(state.mu) == jax.tree.structure(state.nu) == jax.tree.structure(model)
    assert state.mu.blocks.qkv.axes == model.blocks.qkv.axes


def test_muon_keeps_no_second_moment_of_the_matrices():
    model = Model()
    state = build(model, name="muon").init(model)
    matrices = {".blocks.qkv.value", ".blocks.out.value", ".blocks.up.value", ".blocks.down.value"}
    assert set(named_leaves(state.muon.mu)) == matrices
    assert set(named_leaves(state.adamw.nu)) == set(named_leaves(model)) - matrices


@pytest.mark.parametrize("rule", RULES)
def test_skipped_step_changes_nothing_even_when_gradients_are_nan(rule):
    """Parameters, moments and counts stay; under jit with donated inputs."""
    model = Model()
    optimizer = build(model, name=rule)
    step = jax.jit(partial(apply_update, optimizer=optimizer), donate_argnums=(0, 1))
    params, state = step(model, optimizer.init(model), Model(1), jnp.float32(0.1), skip=jnp.bool_(False))
    before = named_leaves((params, state))
    nans = jax.tree.map(lambda x: jnp.full_like(x, jnp.nan), Model())
    params, state = step(params, state, nans, jnp.float32(0.1), skip=jnp.bool_(True))
    after = named_leaves((params, state))
    assert before.keys() == after.keys()
    for name in before:
        np.testing.assert_array_equal(before[name], after[name])
    assert step._cache_size() == 1


def rms(x):
    return float(jnp.sqrt(jnp.mean(jnp.square(x))))


def test_muon_moves_fused_matrices_alike():
    """Queries' and gate's gradients 100 times the others': all move by about 0.2 x 0.875, as if alone."""
    config = ModelConfig(
        num_layers=2, hidden_size=64, num_heads=8, num_kv_heads=4, ffn_hidden_size=96, vocab_size=50, positions="rope",
        activation="swiglu", norm="rmsnorm", bias=False,
    )  # fmt: skip
    direction, g = muon_step(
        config, lambda name, x: loud(x, 2, 2) if "qkv" in name else loud(x, 1, 1) if "fc1" in name else x
    )
    parts = {
        "blocks.attention.qkv": ((64, 4, 4, 8), {"q": np.s_[:, :, :2], "k": np.s_[:, :, 2], "v": np.s_[:, :, 3]}),
        "blocks.mlp.fc1": ((64, 2, 96), {"gate": np.s_[:, 0], "up": np.s_[:, 1]}),
    }
    for name, (shape, places) in parts.items():
        assert direction[name].shape == (2, *shape)
        for layer in range(2):
            for part, place in places.items():
                got = direction[name][layer][place]
                expected = muon_direction(np.float64(g[name][layer][place]), (64, -1))
                np.testing.assert_allclose(got, expected, rtol=1e-3, atol=1e-4)
                print(name, layer, part, f"rms {rms(got):.3f}")
                assert rms(got) == pytest.approx(0.175, abs=0.02), part


def test_muon_moves_every_expert_by_itself():
    """Experts of very different gradients, the shared one and the router: each as a matrix of its own."""
    config = ModelConfig(
        num_layers=2, hidden_size=32, num_heads=4, vocab_size=50, positions="rope", activation="swiglu", norm="rmsnorm",
        bias=False, experts=4, expert_ffn_size=48, shared_ffn_size=24, shared_gate=True,
    )  # fmt: skip
    direction, g = muon_step(config, lambda name, x: loud(x, 0, 2) if "mlp.fc" in name else x)
    for layer, expert, part in np.ndindex(2, 4, 2):
        gradient = np.float64(g["blocks.mlp.fc1"][layer, expert, :, part])
        got = direction["blocks.mlp.fc1"][layer, expert, :, part]
        np.testing.assert_allclose(got, muon_direction(gradient, (32, 48)), rtol=1e-3, atol=1e-4)
        gradient = np.float64(g["blocks.mlp.fc2"][layer, expert])
        got = direction["blocks.mlp.fc2"][layer, expert]
        np.testing.assert_allclose(got, muon_direction(gradient, (48, 32)), rtol=1e-3, atol=1e-4)
    for name, shape in {"router": (32, 4), "shared.fc2": (24, 32)}.items():
        gradient = np.float64(g[f"blocks.mlp.{name}"][1])
        got = direction[f"blocks.mlp.{name}"][1]
        np.testing.assert_allclose(got, muon_direction(gradient, shape), rtol=1e-3, atol=1e-4, err_msg=name)
    # A vector has no two sides: AdamW, whose first step is the sign.
    np.testing.assert_allclose(direction["blocks.mlp.shared_gate"], np.sign(g["blocks.mlp.shared_gate"]), rtol=1e-3)


def loud(x, dim, count):
    """The first `count` entries of a layer's dimension `dim`, which comes after the layers, 100 times as large."""
    factors = np.where(np.arange(x.shape[1 + dim]) < count, 100.0, 1.0)
    return x * factors.reshape(-1, *[1] * (x.ndim - 2 - dim))


def muon_step(config, change):
    """Direction of a first muon step without decay on a real model, and its Nesterov gradient, by name."""
    optimizer = optimizer_for(OptimConfig(name="muon", weight_decay=0), config)
    rng = np.random.default_rng(0)
    params = filled(lambda key: build_model(key, config), lambda shape: rng.normal(size=shape))
    grads = annotate(params, lambda name, x: jnp.float32(change(name, np.asarray(x[...]))))
    direction, _ = jax.jit(lambda g, p: optimizer.update(g, optimizer.init(p), p))(grads, params)
    # A first step's momentum is its gradient up to a factor, to which Newton-Schulz is indifferent.
    return ({name: np.asarray(x[...]) for name, x in names_and_leaves(tree)} for tree in (direction, grads))


def test_every_family_can_be_trained_with_muon():
    """No matrix is left without a side that is the embedding."""
    for words in FAMILY_WORDS:
        config = load_config(None, [*FAMILY_SHAPE, *words.split()]).config
        params = jax.eval_shape(lambda key, c=config.model: build_model(key, c), jax.random.key(0))
        optimizer = optimizer_for(OptimConfig(name="muon"), config.model)
        direction, _ = jax.eval_shape(lambda p, o=optimizer: o.update(p, o.init(p), p), params)
        assert [x.shape for x in jax.tree.leaves(direction)] == [x.shape for x in jax.tree.leaves(params)]


FAMILY_SHAPE = ("model.vocab_size=40", "model.num_layers=1", "model.hidden_size=16", "model.num_heads=2")
FAMILY_WORDS = (
    "model.family=bert model.token_types=2 model.pair_task=true",
    "model.family=t5 model.positions=relative model.bias=false model.norm=rmsnorm",
    "model.qk_norm=true model.num_kv_heads=1 model.positions=rope",
)


def test_muon_sends_no_experts_and_no_layers():
    """Each device orthogonalises what it holds: expert 2 x pipe 2 with two chunks of layers a stage."""
    words = "model.experts=4 model.activation=swiglu model.bias=false model.num_layers=4 model.ffn_hidden_size=24"
    layout = "parallel.pipe=2 parallel.expert=2 parallel.chunks=2 optim.name=muon"
    config = load_config(None, [*FAMILY_SHAPE, *words.split(), *layout.split()]).config
    mesh = build_mesh(dict.fromkeys(AXES, 1) | {"pipe": 2, "expert": 2}, jax.devices()[:4])
    _, state, at = build_init(config, Rules.of(mesh, config.parallel, config.model))
    assert list(state.params.blocks.mlp.fc1.shape[:2]) == [2, 2]  # chunks, layers
    update = jax.jit(
        optimizer_for(config.optim, config.model).update,
        in_shardings=(at.params, at.opt_state, at.params),
        out_shardings=(at.params, at.opt_state),
    )
    compiled = update.lower(state.params, state.opt_state, state.params).compile()
    assert [record for record in collectives(compiled, mesh) if record.bytes > 4] == []


def test_muon_refuses_a_matrix_without_an_embed_side():
    weights = {"w": jnp.ones((3, 4))}
    optimizer = build_optimizer(OptimConfig(name="muon"), {"w": "matrix"}, {"w": ("mlp", "mlp")})
    with pytest.raises(ValueError, match="no embed side"):
        optimizer.update(weights, optimizer.init(weights), weights)


def test_clipping_is_megatrons():
    grads = {"a": jnp.array([3.0, 0.0]), "b": jnp.array([[4.0]])}
    clipped, norm = clip_by_global_norm(grads, 1.0)
    assert float(norm) == 5.0
    np.testing.assert_allclose(clipped["b"], 4 / (5 + 1e-6), rtol=1e-7)
    for max_norm in (5.1, 0.0):
        unclipped, norm = clip_by_global_norm(grads, max_norm)
        assert float(norm) == 5.0
        np.testing.assert_array_equal(unclipped["a"], grads["a"])


def test_norm_of_half_precision_is_taken_in_float32():
    """4096 squares of 2^-8 add up exactly in float32; in bfloat16 the sum would stall, in float16 squares vanish."""
    for dtype in (jnp.bfloat16, jnp.float16):
        norm = global_norm({"g": jnp.full((4096,), 2.0**-8, dtype)})
        assert norm.dtype == jnp.float32 and float(norm) == 0.25


@pytest.mark.skipif(jax.device_count() < 4, reason="needs 4 (simulated) devices")
def test_replicated_gradients_count_once():
    """On a tensor axis of 4, a replicated gradient of norm 3 and a sharded one of norm 4 make 5, not 7.2."""
    mesh = Mesh(np.asarray(jax.devices()[:4]), ("tensor",))
    grads = {
        "norm": jax.device_put(jnp.array([3.0, 0.0]), NamedSharding(mesh, P())),
        "matrix": jax.device_put(jnp.full((4, 4), 1.0), NamedSharding(mesh, P("tensor"))),
    }
    assert float(jax.jit(global_norm)(grads)) == 5.0
