"""Memory that XLA planned for steps of published models on absent H100s, and the parts of such steps.

The numbers in `ROWS` come from a run of `python -m bench.closed_form_memory` (jax 0.10.2).
"""

from __future__ import annotations

import math
import re
from dataclasses import replace
from typing import NamedTuple

import jax

from megajax.config import Config, load_config
from megajax.config.parallel import AXES, fit_vocabulary
from megajax.costs.device import Device
from megajax.parallel.pipeline.schedule import Interleaved1F1B

NODES_16 = "parallel.pipe=8 parallel.data=2 parallel.tensor=8"


class Row(NamedTuple):
    """A layout, and GiB per GPU in XLA's plan."""

    preset: str
    words: str
    """Of a command line."""
    arguments: float
    temporary: float


SMALL = (
    Row("gpt3_1.3b", "train.remat=none train.micro_batch_size=2 train.global_batch_size=8", 14.71, 26.80),
    Row("llama3_8b", "parallel.tensor=8 train.remat=[qkv,mlp_hidden] train.global_batch_size=8", 11.22, 10.50),
    Row("gpt3_1.3b", "parallel.data=8 train.micro_batch_size=4 train.global_batch_size=32", 14.71, 13.46),
    Row(
        "gpt3_1.3b",
        "parallel.data=8 parallel.zero=1 train.remat=full train.micro_batch_size=8 train.global_batch_size=256",
        1.85,
        13.30,
    ),
    Row("gpt3_1.3b", "train.precision=fp32 train.micro_batch_size=2 train.global_batch_size=8", 14.71, 19.76),
    Row(
        "gpt3_2.7b",
        "train.attention=xla parallel.tensor=2 train.micro_batch_size=2 train.global_batch_size=8",
        14.82,
        15.03,
    ),
    Row(
        "gpt3_6.7b",
        "parallel.tensor=4 parallel.data=2 parallel.zero=1 parallel.sequence_parallel=false train.micro_batch_size=2 "
        "train.global_batch_size=16",
        9.31,
        17.01,
    ),
    Row("llama2_7b", "parallel.pipe=2 parallel.fsdp=4 train.global_batch_size=32", 9.42, 28.41),
    Row(
        "llama2_7b",
        "parallel.pipe=2 parallel.context=2 parallel.tensor=2 parallel.chunks=4 train.global_batch_size=8",
        18.83,
        15.03,
    ),
    Row("llama3_8b", "parallel.fsdp=8 train.micro_batch_size=1 train.global_batch_size=32", 11.22, 35.55),
    Row(
        "llama3_8b",
        "parallel.context=4 parallel.fsdp=2 train.attention=ring train.global_batch_size=8",
        44.87,
        42.28,
    ),
    Row("gpt3_13b", "parallel.pipe=4 parallel.tensor=2 parallel.chunks=2 train.global_batch_size=16", 18.00, 15.94),
)
LARGE = (
    Row("megatron_22b", "parallel.tensor=8 train.micro_batch_size=4", 30.85, 16.72),
    Row("megatron_175b", NODES_16, 30.53, 27.29),
    Row("megatron_175b", f"{NODES_16} train.remat=full", 30.53, 17.12),
    Row("megatron_175b", f"{NODES_16} parallel.chunks=3", 30.53, 23.76),
    Row("megatron_175b", f"{NODES_16} parallel.chunks=3 train.remat=full", 30.53, 16.77),
    Row(
        "megatron_530b",
        f"{NODES_16} parallel.pipe=35 parallel.data=8 parallel.chunks=3 train.global_batch_size=2240",
        21.22,
        26.43,
    ),
    Row("megatron_1t", f"{NODES_16} parallel.pipe=64 parallel.data=6 train.global_batch_size=3072", 22.09, 45.17),
)
ROWS = (*SMALL, *LARGE)


def published(preset: str, words: str) -> Config:
    """A preset in bf16, laid out as the words say."""
    everywhere = ["parallel.data=1", "train.precision=bf16", "train.steps=1"]
    config = load_config(f"models/{preset}.yaml", [*everywhere, *words.split()]).config
    return replace(config, model=fit_vocabulary(config.model, config.parallel))


def mesh_sizes(config: Config) -> dict[str, int]:
    """Devices along every mesh axis."""
    return {axis: getattr(config.parallel, axis) for axis in AXES}


def ring_bytes(config: Config, step: jax.stages.Compiled) -> int:
    """Bytes of saved activations that the loop over ticks carries: arrays [slots, layers of a chunk, ...]."""
    parallel = config.parallel
    schedule = Interleaved1F1B(parallel.pipe, parallel.chunks, Device.of(config).microbatches)
    leading = f"{schedule.ring_slots},{schedule.layers_per_chunk(config.model.num_layers)},"
    widths = {"bf16": 2, "f32": 4}
    loops = re.findall(r"= \((.*)\) while\(", str(step.as_text()))
    carried = [re.findall(rf"(\w+)\[({leading}[\d,]+)\]", loop) for loop in loops]
    sizes = [sum(widths[dtype] * math.prod(map(int, dims.split(","))) for dtype, dims in loop) for loop in carried]
    return max(sizes) if parallel.pipe > 1 else 0
