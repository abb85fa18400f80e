"""Plans of mixtures, BERT, T5 and whole heads, compared with numbers by hand and with compiled steps."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from math import prod

import jax
import pytest
from jsonschema import Draft202012Validator

from megajax.config import Config, DataConfig, InputError, ModelConfig, ParallelConfig, TrainConfig
from megajax.config.parallel import AXES
from megajax.costs.memory import saved_per_layer, stage_memory
from megajax.plan import main
from megajax.planning.collectives import PLACES, Traffic, collectives
from megajax.planning.deviceless import abstract_step, compile_step, has_compiler
from megajax.planning.plan import Plan, plan
from megajax.planning.report import html_report
from megajax.planning.schema import SCHEMA
from megajax.show import sharding_of
from tests.planning.contracts import hoisted
from tests.planning.test_plan import assert_caused_is_sent
from tests.planning.traced_flops import matmul_flops

D, F, N, H, V, L, S, T, B = 64, 96, 4, 16, 512, 3, 64, 32, 2
"""T: tokens that T5's decoder sees; B: samples of a micro batch."""
SHAPE = ModelConfig(
    num_layers=L, hidden_size=D, num_heads=N, ffn_hidden_size=F, max_positions=S, vocab_size=V, bias=False
)
MIXTURE = replace(SHAPE, positions="rope", activation="swiglu", experts=8, experts_per_token=2, tied_head=False)
SHARED = replace(MIXTURE, shared_ffn_size=32, shared_gate=True)
BERT = replace(SHAPE, family="bert", token_types=2, pair_task=True, bias=True)
NORMED = replace(SHAPE, positions="alibi", embedding_norm=True, bias=True)
T5 = replace(SHAPE, family="t5", encoder_layers=2, positions="relative")
GEMMA = replace(
    SHAPE, num_layers=4, positions="rope", norm="rmsnorm", activation="geglu", branch_norm=True, window=16,
    layer_pattern=("local", "global"), attention_softcap=50.0, logit_softcap=30.0, embedding_scale=True,
)  # fmt: skip


def configured(model: ModelConfig, remat: str = "selective", micro: int = B, **parallel: int | bool) -> Config:
    """Two microbatches."""
    layout = ParallelConfig(**({"data": 1} | parallel))
    replicas = layout.fsdp * layout.expert * layout.data
    train = TrainConfig(steps=1, global_batch_size=2 * micro * replicas, micro_batch_size=micro, remat=remat)
    return Config(
        model=model,
        data=DataConfig(seq_length=S, decoder_seq_length=T) if model.family == "t5" else DataConfig(seq_length=S),
        train=train,
        parallel=layout,
    )


@cache
def planned(model: ModelConfig, remat: str = "selective", **parallel: int | bool) -> Plan:
    return plan(configured(model, remat, **parallel))


def sent(whole: Plan) -> dict[str, float]:
    return {axis: communication.bytes for axis, communication in whole.communication.items()}


def loops(whole: Plan) -> dict[str, list[float]]:
    """Bytes over every axis in the layers forward, backward, for each microbatch, for each step."""
    return {axis: [sent.places[place] for place in PLACES] for axis, sent in whole.communication.items()}


# By hand: fp32, so 4 bytes a number


def test_what_a_mixture_sends_over_expert_and_tensor():
    """Expert 4 x tensor 2, M = 2: the experts of a device see 4 x 2 samples, each token once.

    Over `expert` a layer gathers its input twice and a cotangent once, scatters an output and a gradient; with them go
    the numbers and the shares of the 2 experts of a token (the gradient of the shares alone comes back). All that is no
    expert's (attention and router; norms with them) is summed for every microbatch, the two tables once a step.
    """
    tokens = B * S
    stream, chosen = 4 * tokens * D, 5 * 4 * tokens * 2
    attention = (4 * D + 4 * D * N * H) / 2  # LayerNorms
    tables = 2 * V * D / 2
    assert sent(planned(MIXTURE, expert=4, tensor=2)) == {
        "expert": 2 * L * (4 * (5 * stream + chosen) + 4 * (attention + 8 * D)) + 4 * tables,
        "tensor": 2 * L * (10 * stream + chosen + 4 * 8 * D) + 2 * 4 * stream,
    }


def test_which_loop_of_a_pipeline_sends_it():
    """Pipe 2 x data 2 x tensor 2 x fsdp 2, M = 2 in 3 ticks, one layer each.

    Forward a layer gathers two inputs and scatters two outputs, backward it gathers both inputs and two cotangents and
    scatters two gradients; its matrices are gathered twice, scattered once. A microbatch's rows are scattered and their
    gradient gathered, the head's input the other way round; 2 + 1 activations and as many gradients but the last are
    passed on, and 4 summed; a tied table is gathered and scattered for each use. Gradients cross `data` in fp32.
    """
    whole = planned(replace(SHAPE, num_layers=2), pipe=2, data=2, tensor=2, fsdp=2)
    stream, table, weights = 4 * B * S * D, 4 * V * D / 4, 4 * (4 * D * N * H + 2 * D * F) / 2
    vectors = 4 * 4 * D / 2  # of two norms
    places = 4 * S * D / 2
    matrices = weights + vectors
    assert loops(whole) == {
        "tensor": [3 * 4 * stream, 3 * 6 * stream, 2 * 4 * stream, 0],
        "fsdp": [3 * matrices, 3 * 2 * matrices, 2 * (2 * 2 * table + 2 * places), 0],
        "pipe": [0, 0, (2 * 3 - 1 + 2 * 4) * stream / 2, 0],
        "data": [0, 0, 0, pytest.approx((matrices + table) / 2, rel=0.1)],  # places and the last norm
    }


def test_which_loop_of_a_mixture_sends_it():
    """Expert 4 x tensor 2, M = 2 (see above): what is only summed of the tables' gradients is summed once a step."""
    tokens = B * S
    stream, chosen = 4 * tokens * D, 4 * tokens * 2
    attention = (4 * D + 4 * D * N * H) / 2
    forward, backward = 2 * (stream + chosen), 3 * (stream + chosen)
    assert loops(planned(MIXTURE, expert=4, tensor=2)) == {
        "expert": [2 * L * 4 * forward, 2 * L * (4 * backward + 4 * (attention + 8 * D)), 0, 4 * 2 * V * D / 2],
        "tensor": [
            2 * L * (2 * stream + forward),
            2 * L * (3 * stream + backward + 4 * 8 * D),
            2 * 4 * stream,
            0,
        ],
    }


def test_an_expert_works_through_whole_blocks():
    """300 tokens each of 1,200 that choose 2 of 8, in blocks of 128 rows: 3 blocks, 384 rows. Forward 3 products of
    D x F, backward 6 and the first 2 again."""
    config = replace(configured(MIXTURE, "none", micro=1), data=DataConfig(seq_length=1200))
    config = replace(config, model=replace(MIXTURE, max_positions=1200), train=replace(config.train, attention="xla"))
    whole = plan(config)
    assert whole.load == (300, 3, 128)
    experts = 8 * 384 * 2 * D * F * (3 + 6 + 2)
    router = 3 * 2 * 1200 * D * 8
    attention = 3 * (2 * 1200 * 4 * D * N * H + 4 * 1200 * 1200 * N * H)
    head = 3 * 2 * 1200 * D * V
    assert whole.time.compiled_flops == 2 * (L * (experts + router + attention) + head)
    assert "balanced load: 300 tokens each in a microbatch, computed in 3 blocks of 128 rows (28% padding)" in str(
        whole
    )
    assert "forward once more in the backward pass, whatever train.remat is" in str(whole)


def test_a_layer_of_a_mixture_keeps_no_hidden_units():
    """Block input, what follows the attention, q, k and v, and what the attention gave."""
    config, one = configured(MIXTURE), dict.fromkeys(AXES, 1)
    assert saved_per_layer(config, one) == 4 * B * S * (2 * D + 3 * N * H + N * H)
    shared = saved_per_layer(configured(SHARED), one) - saved_per_layer(config, one)
    assert shared == 4 * B * S * 2 * 32


def test_what_t5_sends():
    """Tensor 2 x fsdp 2. The decoder's layer has six borders instead of four; what the encoder made is gathered once,
    and its gradient scattered in every layer. The biases of distances are shared by the layers, their gradients not."""
    encoder, decoder = 4 * B * S * D, 4 * B * T * D
    layer = (2 * D + 4 * D * N * H + 2 * D * F) / 2
    crossing = (2 * D * N * H + 2 * D * N * H + D) / 2 + D / 2 + 0  # LayerNorm: D more
    weights = 2 * layer + 3 * (layer + crossing)
    weights += (2 * 2 * D + 3 * 2 * D) / 2  # the shifts of the norms
    table = V * D / 2
    found = sent(planned(T5, tensor=2, fsdp=2))
    assert found["tensor"] == 2 * (2 * 10 * encoder + L * (15 * decoder + encoder) + 4 * decoder + 3 * encoder)
    biases = 4 * N / 2 * (2 * S * S + L * T * T)  # gradients of what is added to the scores, fp32, in every layer
    assert found["fsdp"] == pytest.approx(2 * (3 * 4 * weights + (1 * 4 + 3 * 4) * table + biases), rel=1e-3)


def test_what_bert_sends():
    """Tensor 2 x fsdp 2: tables of words and places, and two [D, D] matrices of the heads, whole over `tensor`."""
    stream = 4 * B * S * D
    layer = 4 * D * N * H + 2 * D * F
    vectors = 4 * D + 3 * N * H + D + F + D
    found = sent(planned(BERT, tensor=2, fsdp=2))
    assert found["tensor"] == 2 * (10 * L + 4) * stream + 4 * D * D / 2
    tables = (4 + 2 * 4) * V * D / 2 + (4 + 4) * S * D / 2
    assert found["fsdp"] == 2 * (L * 3 * 4 * (layer + vectors) / 2 + tables + 2 * (4 + 4) * D * D)


def test_whole_heads_are_on_every_device():
    """Tensor 4, 6 heads: qkv forward of all tokens, and the gradient of what the attention gave; else a quarter."""
    model = replace(SHAPE, num_heads=6, head_dim=8)
    whole = planned(model, tensor=4, whole_heads=True)
    q = 6 * 8
    stream = 4 * B * S * D
    assert sent(whole)["tensor"] == 2 * (L * ((1 + 1 + 3 + 2) * stream + 4 * D * 4 * q) + 4 * stream)
    tokens = B * S
    qkv, out = 2 * D * 3 * q * (1 + 2 / 4) * tokens, 2 * D * q * (1 + 2 / 4) * tokens
    core = 4 * tokens * S * q * 3 + 2 * tokens * S * q  # and the scores again
    mlp, head = 3 * 2 * tokens * 2 * D * F / 4, 3 * 2 * tokens * D * V / 4
    assert whole.time.compiled_flops == 2 * (L * (qkv + out + core + mlp) + head)
    assert whole.stages["first"].weights == 4 * sum(prod(p.shard) for p in sharding_of(whole.config, 4).parameters)


def test_what_a_norm_behind_the_embedding_sends_in_a_pipeline():
    """BLOOM's: its gradient needs what was looked up, which no stage has kept: both microbatches are looked up again.

    A pipeline of 2 passes on 2 + 1 activations and as many gradients, the last of which nobody takes.
    """
    layout = {"pipe": 2, "tensor": 2, "fsdp": 2}
    plain, normed = (
        sent(planned(replace(SHAPE, num_layers=2, embedding_norm=norm, positions="alibi"), **layout))
        for norm in (False, True)
    )
    stream, table = 4 * B * S * D, 4 * V * D / 4  # cut over pipe and tensor
    assert plain["pipe"] == (2 * 3 - 1 + 2 * 4) * stream / 2
    more = {axis: normed[axis] - plain[axis] for axis in plain}
    assert more == {"tensor": 2 * stream, "pipe": 2 * stream / 2, "fsdp": 2 * table}


def test_what_norms_of_the_branches_repeat():
    """Their backward passes need the outputs of attention and MLP, which full rematerialisation computes, and scatters
    over `tensor`, once more. Without these norms nobody needs the MLP's."""
    stream = 4 * B * S * D
    for remat, again in (("none", 0), ("selective", 0), ("full", 2), (("branch_output",), 0), (("qkv",), 2)):
        assert sent(planned(GEMMA, remat, tensor=4))["tensor"] == 2 * (4 * (10 + again) + 4) * stream
    plain = replace(GEMMA, branch_norm=False)
    assert sent(planned(plain, "full", tensor=4))["tensor"] == 2 * (4 * (10 + 1) + 4) * stream
    more, less = (planned(model, "full", tensor=4).time.compiled_flops for model in (GEMMA, plain))
    assert more - less == 2 * 4 * 2 * B * S * D * F / 4
    kept = [planned(model, "selective", tensor=4).time.compiled_flops for model in (GEMMA, plain)]
    assert kept[0] == kept[1]


def test_what_norms_of_the_branches_repeat_of_a_mixture():
    """Expert 4 x tensor 2: as above, the outputs of the experts are multiplied and scattered once more."""
    stream, normed = 4 * B * S * D, replace(MIXTURE, branch_norm=True)
    kept, again = (planned(normed, remat, expert=4, tensor=2) for remat in ("selective", "full"))
    more = {axis: bytes - sent(kept)[axis] for axis, bytes in sent(again).items()}
    assert more == {"expert": 2 * L * 4 * stream, "tensor": 2 * L * 2 * stream}
    plain = [planned(MIXTURE, remat, expert=4, tensor=2).time.compiled_flops for remat in ("selective", "full")]
    experts = again.time.compiled_flops - kept.time.compiled_flops - (plain[1] - plain[0])
    rows = 8 / 4 * again.load.blocks * again.load.block_rows
    assert experts == 2 * L * rows * 2 * D * F / 2 * 3


# Against the program

CASES = [
    pytest.param(MIXTURE, {"expert": 4, "tensor": 2}, id="mixture expert 4 x tensor 2"),
    pytest.param(MIXTURE, {"tensor": 2, "fsdp": 2, "expert": 2}, id="mixture tensor 2 x fsdp 2 x expert 2"),
    pytest.param(SHARED, {"tensor": 4}, id="mixture with a shared expert tensor 4"),
    pytest.param(BERT, {"tensor": 2, "fsdp": 2}, id="bert tensor 2 x fsdp 2"),
    pytest.param(T5, {"tensor": 4}, id="t5 tensor 4"),
    pytest.param(T5, {"tensor": 2, "fsdp": 2}, id="t5 tensor 2 x fsdp 2"),
    pytest.param(GEMMA, {"tensor": 2, "fsdp": 2}, id="gemma tensor 2 x fsdp 2"),
    pytest.param(NORMED, {"pipe": 3, "tensor": 2, "fsdp": 2}, id="bloom pipe 3 x tensor 2 x fsdp 2"),
]


@pytest.mark.parametrize("remat", ["selective", "full", "none"])
@pytest.mark.parametrize(("model", "parallel"), CASES)
def test_parameters_cause_what_is_sent(model: ModelConfig, parallel: dict[str, int], remat: str):
    """`show --explain`, parameter by parameter, adds up to the plan, but for `pipe`, which activations cross."""
    assert_caused_is_sent(planned(model, remat, **parallel))


@pytest.mark.slow
@pytest.mark.skipif(not has_compiler(), reason="compiling for a GPU that is not there needs the CUDA plugin")
@pytest.mark.parametrize(
    ("model", "remat", "parallel"),
    [
        pytest.param(MIXTURE, "selective", {"expert": 2, "tensor": 2, "fsdp": 2}, id="mixture"),
        pytest.param(BERT, "selective", {"tensor": 2, "fsdp": 2}, id="bert"),
        pytest.param(T5, "selective", {"tensor": 2, "fsdp": 2}, id="t5"),
        pytest.param(GEMMA, "full", {"tensor": 2, "fsdp": 2}, id="gemma"),
        pytest.param(
            replace(MIXTURE, branch_norm=True), "full", {"expert": 2, "tensor": 2, "fsdp": 2}, id="normed mixture"
        ),
    ],
)
def test_the_compiled_step_sends_it(model: ModelConfig, remat: str, parallel: dict[str, int]):
    """In every loop, in bf16, compiled for H100s that are not there. Takes about 10 s each: they have much to compile.

    Sums of vectors, which no closed form has, weigh much in models so small: 16 KiB in a loop may be theirs.
    """
    config = configured(model, remat, **parallel)
    whole = plan(replace(config, train=replace(config.train, precision="bf16")))
    step = compile_step(whole.config, "H100")
    found = collectives(step.step, step.rules.mesh)
    print(found)
    moved = hoisted(whole)
    for axis, planned in loops(whole).items():
        expected = [sent + moved.get(f"over {axis}, {place}", 0) for sent, place in zip(planned, PLACES, strict=True)]
        assert loops_of(found, axis) == pytest.approx(expected, rel=0.03, abs=2**14), axis
        assert sum(loops_of(found, axis)) == pytest.approx(sum(expected), rel=0.03), axis


def loops_of(traffic: Traffic, axis: str) -> list[int]:
    """The same of a program."""
    return [traffic.over(axis).at(place).total_bytes() for place in PLACES]


def test_the_layers_of_simulated_devices_send_it():
    """XLA's other compiler leaves embedding and head as they are written; the layers send the same on every machine."""
    whole = planned(SHAPE, tensor=2, fsdp=2)
    step, rules, state, batch = abstract_step(whole.config, jax.devices()[:4], "cpu")
    found = collectives(step.lower(state, batch).compile(), rules.mesh)
    print(found)
    for axis, expected in loops(whole).items():
        assert loops_of(found, axis)[:2] == pytest.approx(expected[:2], rel=0.01), axis


@pytest.mark.parametrize("remat", ["none", "selective", "full"])
@pytest.mark.parametrize("model", [BERT, T5, GEMMA], ids=["bert", "t5", "gemma"])
def test_the_step_executes_these_flops(model: ModelConfig, remat: str):
    whole = planned(model, remat)
    step, _, state, batch = abstract_step(whole.config, jax.devices()[:1], "cpu")
    assert matmul_flops(jax.make_jaxpr(step)(state, batch)) == whole.time.compiled_flops


# The planner as a whole


@pytest.mark.parametrize(("model", "parallel"), CASES)
def test_a_plan_has_every_output(model: ModelConfig, parallel: dict[str, int]):
    whole = planned(model, **parallel)
    answer = whole.as_dict() | {"remedy": None, "candidates": [], "compiled": None}
    Draft202012Validator(SCHEMA).validate(answer)
    assert (answer["experts"] is None) == (model.experts == 0)
    assert "communication over" in html_report(whole)
    assert whole.time.seconds == pytest.approx(sum(whole.time.parts.values()))


def test_a_plan_says_what_it_leaves_out():
    """Muon's matrix products, and what they send, are in no closed form."""
    config = configured(SHAPE)
    assert plan(config).uncounted is None
    whole = plan(replace(config, optim=replace(config.optim, name="muon")))
    assert "not planned: optim.name=muon: its matrix products" in str(whole)
    answer = whole.as_dict() | {"remedy": None, "candidates": [], "compiled": None}
    Draft202012Validator(SCHEMA).validate(answer)
    assert answer["uncounted"] == whole.uncounted


def test_a_mixture_with_dense_layers_has_no_costs():
    config = configured(replace(MIXTURE, dense_layers=1))
    for cost in (plan, lambda config: stage_memory(config, dict.fromkeys(AXES, 1), 0)):
        with pytest.raises(InputError, match=r"^model.dense_layers 1: costs are known of mixtures whose layers all"):
            cost(config)


def test_tokens_of_t5_are_those_of_both_sides():
    whole = planned(T5)
    assert whole.tokens_per_second == pytest.approx(2 * B * (S + T) / whole.time.seconds)


def test_a_search_shards_experts(tmp_path, capsys: pytest.CaptureFixture[str]):
    words = ["models/mixtral_8x7b.yaml", "train.precision=bf16", "train.global_batch_size=64", "--gpus", "32"]
    main([*words, "--search", "--top", "3"])
    assert " expert=" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("model", "parallel", "message"),
    [
        (MIXTURE, {}, "model.experts"),
        (T5, {}, "model.family t5"),
        (SHAPE, {"tensor": 2, "whole_heads": True}, "parallel.whole_heads"),
        (replace(SHAPE, branch_norm=True), {}, "model.branch_norm"),
        (replace(SHAPE, attention_softcap=50.0), {}, "model.attention_softcap"),
        (replace(SHAPE, logit_softcap=30.0), {}, "model.logit_softcap"),
        (replace(SHAPE, num_layers=2, window=8, layer_pattern=("local", "global")), {}, "model.layer_pattern"),
    ],
)
def test_no_accounting_of_megatron(model: ModelConfig, parallel: dict, message: str):
    with pytest.raises(InputError, match=f"are not planned with {message}: .* leave like=megatron out"):
        plan(configured(model, **parallel), like="megatron")
