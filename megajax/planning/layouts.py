"""Every way to spread a model and a global batch over a number of devices; needs no device.

A layout is a configuration: the given one, with other `parallel` sizes and a micro batch that fits.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from math import gcd
from typing import Literal

import jax
from jax.sharding import AbstractMesh, AxisType

from megajax.config import Config, ConfigError, ParallelConfig, check_config
from megajax.config.parallel import AXES, fit_vocabulary
from megajax.models.gpt import Gpt
from megajax.parallel.rules import Rules


def legal_layouts(config: Config, devices: int) -> list[Config]:
    """Every layout of `devices` devices that this model and global batch can train on.

    All mesh sizes and chunks per stage, sequence parallelism and ZeRO on and off where that makes a difference. The
    micro batch is the configured one, or its largest divisor that the samples of a replica fill.
    """
    # The vocabulary excludes no layout: training pads it as the layout wants it.
    model = fit_vocabulary(config.model, ParallelConfig(tensor=devices))
    weights = jax.eval_shape(lambda: Gpt(jax.random.key(0), model))
    return [layout for layout in _candidates(config, devices) if _is_legal(layout, weights)]


def microbatches(layout: Config) -> int:
    """M, the microbatches of a global batch."""
    train = layout.train
    return train.global_batch_size // (train.micro_batch_size * _size(layout, "data") * _size(layout, "fsdp"))


def layout_name(layout: Config) -> str:
    """What distinguishes a layout, in words: `pipe=2 data=4 remat=full microbatches=2`."""
    parallel, remat = layout.parallel, layout.train.remat
    words: dict[str, object] = {key: _size(layout, key) for key in (*AXES, "chunks") if _size(layout, key) > 1}
    if parallel.zero:
        words["zero"] = parallel.zero
    if parallel.tensor > 1:
        words["sequence"] = "on" if parallel.sequence_parallel else "off"
    if layout.train.attention == "ring":
        words["attention"] = "ring"
    words["remat"] = remat if isinstance(remat, str) else "+".join(remat)
    words["microbatches"] = microbatches(layout)
    return " ".join(f"{key}={value}" for key, value in words.items())


def _size(layout: Config, key: str) -> int:
    return getattr(layout.parallel, key)


def _candidates(config: Config, devices: int) -> Iterator[Config]:
    for sizes in _factorizations(devices, len(AXES)):
        yield from _with_mesh(config, dict(zip(AXES, sizes, strict=True)))


def _with_mesh(config: Config, mesh: dict[str, int]) -> Iterator[Config]:
    chunks = _divisors(config.model.num_layers // mesh["pipe"]) if mesh["pipe"] > 1 else [1]
    zero: tuple[Literal[0, 1], ...] = (0, 1) if mesh["data"] > 1 else (0,)
    sequence_parallel = [True, False] if mesh["tensor"] > 1 else [True]
    samples = config.train.global_batch_size // (mesh["data"] * mesh["fsdp"])
    ring = config.train.attention == "ring" and mesh["context"] == 1
    train = replace(
        config.train,
        micro_batch_size=gcd(config.train.micro_batch_size, samples),
        attention="auto" if ring else config.train.attention,
    )
    for c, z, s in product(chunks, zero, sequence_parallel):
        yield replace(config, train=train, parallel=ParallelConfig(**mesh, chunks=c, zero=z, sequence_parallel=s))


def _divisors(number: int) -> list[int]:
    return [divisor for divisor in range(1, number + 1) if number % divisor == 0]


def _factorizations(number: int, parts: int) -> Iterator[tuple[int, ...]]:
    """Every way to write a number as a product of so many, in order."""
    if parts == 1:
        yield (number,)
        return
    for first in _divisors(number):
        for rest in _factorizations(number // first, parts - 1):
            yield (first, *rest)


def _is_legal(layout: Config, weights: Gpt) -> bool:
    """Whether its numbers fit together and the sharding rules divide every weight."""
    parallel = layout.parallel
    sizes = tuple(_size(layout, axis) for axis in AXES)
    mesh = AbstractMesh(sizes, AXES, axis_types=(AxisType.Auto,) * len(AXES))
    try:
        check_config(layout)
        Rules(mesh, parallel.sequence_parallel, parallel.zero).shardings(weights)
    except ConfigError:
        return False
    return True
