"""Keys of the JSON that `python -m megajax.plan --json FILE` writes, as a JSON Schema.

Keys may be added, but none is renamed, and none changes its meaning or unit. Values whose keys end in `bytes` or
`seconds` have that unit, and are those of one GPU unless the description says otherwise.
"""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from megajax.config.parallel import AXES
from megajax.costs.memory import StageMemory
from megajax.planning.collectives import PLACES
from megajax.planning.roofline import LABELS

Schema = dict[str, Any]


def _keys(description: str, /, **keys: Schema) -> Schema:
    """Return the schema of an object that has all of these keys."""
    return {
        "description": description,
        "type": "object",
        "properties": keys,
        "required": list(keys),
        "additionalProperties": False,
    }


def _map(description: str, values: Schema) -> Schema:
    return {"description": description, "type": "object", "additionalProperties": values}


def _list(description: str, items: Schema) -> Schema:
    return {"description": description, "type": "array", "items": items}


def _of(kind: str, description: str, **more: Any) -> Schema:
    return {"description": description, "type": kind, **more}


def _number(description: str) -> Schema:
    return _of("number", description, minimum=0)


def _count(description: str) -> Schema:
    return _of("integer", description, minimum=0)


def _or_null(schema: Schema) -> Schema:
    return {"anyOf": [schema, {"type": "null"}]}


def _mesh() -> Schema:
    return _keys("devices along every mesh axis", **{axis: _count(axis) for axis in AXES})


_FLOPS = _keys(
    "by this attention convention",
    model=_count("FLOPs of a step on all GPUs, forward and backward"),
    hardware=_or_null(_count("the same with recomputation; null = activations kept by name")),
    tflops=_number("1e12 model FLOP/s"),
    mfu=_number("model FLOPs over the dense peak"),
)
_PROFILE = _keys(
    "the virtual profile: the program priced and played; null = simulated devices",
    seconds=_number("of a step"),
    parts=_map("seconds that add up to it, by what is computed or waited for", _number("seconds")),
    transfers=_map(
        "by mesh axes, joined by +",
        _keys(
            "of collectives", hidden=_number("seconds beside kernels"), exposed=_number("seconds that are waited for")
        ),
    ),
    places=_keys("seconds by loop", **{place: _number("seconds") for place in PLACES}),
    lines=_map("seconds by line of Python, the dearest first", _number("seconds")),
    peak_bytes=_number("most temporary memory at a time"),
    uncounted=_map("places of what the reader does not understand, by name", _count("places")),
)
_COMPILED = _keys(
    "the real step, compiled",
    target=_of("string", 'device kind that it was compiled for, or "simulated CPU"'),
    seconds=_number("to trace, lower and compile"),
    host_bytes=_count("most host memory of the compiling process"),
    memory=_map("bytes by XLA's classes: arguments, outputs, temporary, code", _count("bytes")),
    bytes_by_axis=_map("bytes of whole tensors in a step, by mesh axis", _count("bytes")),
    flops=_or_null(_count("of matrix products on a GPU in a step, experts used alike; null = simulated devices")),
    unused=_list("inputs of the step that no result depends on", _of("string", "name")),
    differences=_list("traffic and FLOPs that contradict the closed form", _of("string", "in words")),
    profile=_or_null(_PROFILE),
    collectives=_list(
        "kinds of collectives",
        _keys(
            "one kind",
            op=_of("string", "XLA's name"),
            axes=_list("mesh axes that it crosses", _of("string", "axis")),
            loop=_list("iterations of the loops around it, outermost first", _count("iterations")),
            place=_of("string", "which loops these are", enum=list(PLACES)),
            conditional=_of("boolean", "in a branch: count and bytes are upper bounds"),
            count=_count("executions in a step"),
            bytes=_count("of whole tensors, all executions together"),
            largest=_count("bytes of the largest of these tensors"),
            taken=_number("bytes that are sent as branches are taken"),
        ),
    ),
)

SCHEMA: Schema = {"$schema": "https://json-schema.org/draft/2020-12/schema"} | _keys(
    "a plan",
    gpu=_keys("which", name=_of("string", "as in costs.hardware.GPUS"), memory_bytes=_number("of the device")),
    gpus=_count("how many"),
    like=_of("string", "whose memory and time", enum=["megajax", "megatron"]),
    parameters=_count("of the model, without the vocabulary's padding"),
    layout=_keys(
        "how the model and the batch are spread",
        name=_of("string", "in words"),
        mesh=_mesh(),
        chunks=_count("of layers per pipeline stage"),
        zero=_count("1 = optimizer state is split over data"),
        sequence_parallel=_of("boolean", "residual stream split over tensor"),
        micro_batch_size=_count("samples"),
        global_batch_size=_count("samples"),
        sequence=_count("tokens of a sample"),
        remat={"description": "preset, or names of kept activations", "type": ["string", "array"]},
        precision=_of("string", "fp32, bf16 or fp16"),
    ),
    memory=_keys(
        "of a GPU",
        fits=_of("boolean", "whether need_bytes are at most limit_bytes"),
        limit_bytes=_number("that arrays can have"),
        need_bytes=_number("of the fullest stage"),
        fullest_stage=_of("string", "key of stages"),
        logits_bytes=_count("fp32 logits of a micro batch, were they held all at once"),
        stages=_map(
            'by pipeline stage: "first", "middle", "last"',
            _keys("bytes", **{f.name: _number(f.name) for f in fields(StageMemory)}, total=_number("of them")),
        ),
    ),
    step=_keys(
        "time",
        seconds=_number("of a step"),
        parts=_keys("seconds that add up to it", **{name: _number(label) for name, label in LABELS.items()}),
        limit=_of("string", "what takes longest, in words"),
        tokens_per_second=_number("of all GPUs together"),
        bubble_fraction=_number("time that stages wait over the time that they compute"),
        hfu=_number("executed FLOPs over the dense peak"),
    ),
    flops=_keys("by attention convention: all scores, or those that a causal mask leaves", full=_FLOPS, causal=_FLOPS),
    experts=_or_null(
        _keys(
            "what each expert of a mixture does for a microbatch, the load being balanced; null = no mixture",
            tokens=_number("assignments"),
            blocks=_count("that it computes"),
            block_rows=_count("of a block"),
        )
    ),
    uncounted=_or_null(_of("string", "what the step does besides, in words; null = nothing of weight")),
    communication=_map(
        "by mesh axis",
        _keys(
            "in a step",
            bytes=_number("of whole tensors"),
            places=_keys("these bytes by the loop that sends them", **{place: _number("bytes") for place in PLACES}),
            seconds=_number("that nothing hides"),
            wire=_of("string", "slowest that is needed", enum=["NVLink", "network"]),
        ),
    ),
    budget=_keys(
        "of the whole run", tokens=_number("to train on"), days=_number("without a break"), gpu_hours=_number("of all")
    ),
    remedy=_or_null(_of("string", "smallest change that fits, as words of a command line; null = none is needed")),
    candidates=_list(
        "of --search, fastest first; empty without",
        _keys(
            "a layout",
            layout=_of("string", "in words"),
            micro_batch_size=_count("samples"),
            mesh=_mesh(),
            memory_bytes=_number("that arrays need"),
            seconds=_or_null(_number("of a step; null = does not fit")),
            verdict=_of("string", "why it won or lost"),
        ),
    ),
    compiled=_or_null(_COMPILED),
)
"""JSON Schema of the whole file."""
