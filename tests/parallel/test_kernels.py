"""No kernel drops an argument: it refuses what it cannot do, and the step for GPUs uses all arrays of its batch."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.interpreters.partial_eval as pe
import jax.numpy as jnp
import pytest

from megajax.config import Config, InputError, check_config, load_config
from megajax.models.attention_kernels import NEEDS, Need, Pattern, cudnn_attention, needs_of
from megajax.models.families import batch_arrays
from megajax.models.positions import alibi
from megajax.parallel.collectives import Collectives
from megajax.parallel.context import ring_attention
from megajax.parallel.kernels import Kernel, choose_attention
from megajax.parallel.layout import MeshLayout
from megajax.parallel.mesh import build_mesh
from megajax.parallel.rules import Rules
from megajax.planning.deviceless import abstract_step
from megajax.training.evaluate import build_eval_step

ONE = {"pipe": 1, "data": 1, "fsdp": 1, "expert": 1, "context": 1, "tensor": 1}
SMALL = (
    "model.vocab_size=100", "model.num_layers=2", "model.hidden_size=32", "model.num_heads=4", "model.max_positions=16",
    "data.seq_length=16", "parallel.data=1", "train.steps=1", "train.global_batch_size=2", "train.precision=bf16",
)  # fmt: skip
T5 = "model.family=t5 model.positions=relative model.bias=false model.norm=rmsnorm data.decoder_seq_length=8"
DROPOUT = "model.attention_dropout=0.1 model.hidden_dropout=0.1"
PLAIN = "flash attention: no S x S array"

Call = tuple[Pattern, jax.Array | None, Callable[[jax.Array], jax.Array] | None]
CALLS: dict[Need, Call] = {
    "segments": (Pattern(), jnp.zeros((1, 4), jnp.int32), None),
    "later keys": (Pattern(causal=False), None, None),
    "window": (Pattern(window=2), None, None),
    "scale": (Pattern(scale=1.0), None, None),
    "softcap": (Pattern(softcap=30.0), None, None),
    "bias": (Pattern(bias=alibi(2)), None, None),
    "dropout": (Pattern(), None, lambda probabilities: probabilities),
}
"""A call of attention that needs just this besides plain causal attention."""


def config_of(*words: str) -> Config:
    config = load_config(None, [*SMALL, *" ".join(words).split()]).config
    check_config(config)
    return config


def choice(config: Config, platform: str = "gpu") -> Kernel:
    return choose_attention(config, platform, batch_arrays(config.model, config.data))


@pytest.mark.parametrize("need", NEEDS)
def test_a_kernel_refuses_what_it_cannot_do(need: Need) -> None:
    """Rather than leave it out. Documents are all that the ring knows; the plain kernel knows everything."""
    pattern, segment_ids, drop = CALLS[need]
    assert needs_of(pattern, segment_ids, drop) == {need}
    q = jnp.ones((1, 4, 2, 8), jnp.bfloat16)
    ring = partial(ring_attention, net=Collectives(build_mesh(ONE, jax.devices()[:1])))
    kernels: dict[str, Callable[..., jax.Array]] = {"cudnn": cudnn_attention, "ring": ring}
    for name, kernel in kernels.items():
        call = partial(jax.eval_shape, partial(kernel, pattern=pattern, drop=drop), q, q, q, segment_ids)
        if (name, need) == ("ring", "segments"):
            call()
            continue
        with pytest.raises(ValueError, match=f"{name} attention was handed what it cannot do") as caught:
            call()
        assert NEEDS[need] in str(caught.value)


def test_a_mesh_hands_everything_to_its_kernel() -> None:
    """Whoever chose wrongly learns of it; the flash kernel is not handed parts of sequences either."""
    q = jnp.ones((1, 4, 2, 8), jnp.bfloat16)
    for need, (pattern, segment_ids, drop) in CALLS.items():
        for kernel in ("cudnn", *(["ring"] if need != "segments" else [])):
            layout = MeshLayout(Rules(build_mesh(ONE, jax.devices()[:1])), kernel)
            with jax.set_mesh(layout.rules.mesh), pytest.raises(ValueError, match=f"{kernel} attention was handed"):
                jax.eval_shape(lambda q, at=layout, c=(pattern, segment_ids, drop): at.attention(q, q, q, *c), q)
    layout = MeshLayout(Rules(build_mesh(ONE | {"context": 2}, jax.devices()[:2])), "cudnn")
    with pytest.raises(ValueError, match=r"parts of the sequence \(context\)"):
        layout.attention(q, q, q, Pattern(), None, None)


KINDS = {
    "gpt": ("", {"sample_ids"}, PLAIN),
    "gpt, dropout": (DROPOUT, set(), NEEDS["dropout"]),
    "gpt, hidden dropout alone": ("model.hidden_dropout=0.1", set(), PLAIN),
    "documents apart": ("data.reset_attention=true", {"sample_ids"}, NEEDS["segments"]),
    "positions restart": ("data.reset_positions=true model.positions=rope", {"sample_ids"}, PLAIN),
    "conversations": ("data.kind=instruction", {"sample_ids"}, NEEDS["segments"]),
    "conversations, rope": ("data.kind=instruction model.positions=rope", {"sample_ids"}, NEEDS["segments"]),
    "conversations on a ring": (
        "data.kind=instruction train.attention=ring parallel.context=2", {"sample_ids"}, "as configured",
    ),
    "conversations over context": (
        "data.kind=instruction parallel.context=2", {"sample_ids"},
        "parallel.context shards attend to parts of the sequence",
    ),
    "conversations over tensor, pipe": (
        "data.kind=instruction parallel.tensor=2 parallel.pipe=2", {"sample_ids"}, NEEDS["segments"],
    ),
    "window": ("model.window=4", {"sample_ids"}, NEEDS["window"]),
    "scale": ("model.attention_scale=0.5", {"sample_ids"}, NEEDS["scale"]),
    "softcap": ("model.attention_softcap=30", {"sample_ids"}, NEEDS["softcap"]),
    "local and global": (
        "model.window=4 model.layer_pattern=[global,local]", {"sample_ids"}, NEEDS["window"],
    ),
    "alibi": ("model.positions=alibi", {"sample_ids", "positions"}, NEEDS["bias"]),
    "no positions": ("model.positions=none", {"sample_ids", "positions"}, PLAIN),
    "mixture": ("model.experts=4 model.bias=false data.kind=instruction", {"sample_ids"}, NEEDS["segments"]),
    "bert": ("model.family=bert model.token_types=2 model.pair_task=true", {"sample_ids"}, NEEDS["segments"]),
    "roberta": ("model.family=bert", {"sample_ids", "token_types"}, NEEDS["segments"]),
    "t5": (T5, {"sample_ids"}, NEEDS["segments"]),
    "t5, dropout": (f"{T5} {DROPOUT}", set(), NEEDS["segments"]),
}  # fmt: skip
"""Words; arrays of the batch that such a model has no use for (dropout draws by sample_ids, a table or angles take
positions, a table takes token types); why the kernel was chosen."""


def unused(step: Any, *args: Any) -> set[str]:
    """Arrays of the batch, the last argument, on which no result depends."""
    traced = step.trace(*args).jaxpr
    _, used = pe.dce_jaxpr(traced.jaxpr, [True] * len(traced.jaxpr.outvars))
    names = [path[-1].key for path, _ in jax.tree_util.tree_leaves_with_path(args[-1])]
    return {name for name, is_used in zip(names, used[-len(names) :], strict=True) if not is_used}


@pytest.mark.parametrize("kind", KINDS)
def test_the_step_of_a_gpu_uses_every_array_of_its_batch(kind: str) -> None:
    """The training step and, but for what training alone needs, the evaluation step."""
    words, expected, reason = KINDS[kind]
    config = config_of(words)
    assert choice(config).reason == reason
    devices = jax.devices()[: config.parallel.context * config.parallel.tensor * config.parallel.pipe]
    step, rules, state, batch = abstract_step(config, devices, "gpu")
    assert unused(step, state, batch) == expected
    evaluate = build_eval_step(config, rules, choice(config).name)
    assert unused(evaluate, state.params, batch) == expected | {"sample_ids"}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("train.attention=cudnn data.kind=instruction", f"cudnn cannot run: {NEEDS['segments']}"),
        ("train.attention=cudnn model.window=4", f"cudnn cannot run: {NEEDS['window']}"),
        ("train.attention=cudnn model.family=bert", f"cudnn cannot run: {NEEDS['segments']}"),
        ("train.attention=cudnn train.precision=fp32", "cudnn cannot run: cuDNN attention runs in bf16 and fp16 only"),
        ("train.attention=ring", "ring cannot run: there is one context shard"),
        (f"train.attention=ring parallel.context=2 {DROPOUT}", f"ring cannot run: {NEEDS['dropout']}"),
        ("train.attention=ring parallel.context=2 model.positions=alibi", f"ring cannot run: {NEEDS['bias']}"),
        ("train.attention=ring parallel.context=2 model.attention_softcap=30", f"ring cannot run: {NEEDS['softcap']}"),
        ("train.attention=ring parallel.context=2 model.family=bert", f"ring cannot run: {NEEDS['later keys']}"),
    ],
)
def test_a_forced_kernel_never_falls_back(words: str, message: str) -> None:
    with pytest.raises(InputError) as caught:
        choice(config_of(words))
    assert message in str(caught.value)
    assert "use train.attention=auto" in str(caught.value)
