"""Legal layouts of a model and a global batch on a number of devices, found without a device.

A layout is the given configuration with other `parallel` sizes and a suitable micro batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache, lru_cache
from itertools import product
from math import gcd
from typing import Literal

import jax
from jax.sharding import AbstractMesh, AxisType

from megajax.config import Config, InputError, ModelConfig, ParallelConfig, check_config
from megajax.config.parallel import AXES, fit_vocabulary
from megajax.costs.device import Device
from megajax.models.families import build_model
from megajax.models.model import Model
from megajax.parallel.rules import Rules


def legal_layouts(config: Config, devices: int) -> list[Config]:
    """List every layout of `devices` devices on which this model and global batch can be trained.

    They have all mesh sizes and chunks per stage, with sequence parallelism and ZeRO on and off if that makes a
    difference. The micro batch is the configured one, or its largest divisor that the samples of a replica fill.
    """
    is_legal = legality(config.model, devices)
    layouts = []
    for mesh in meshes(devices):
        choices = (True, False) if mesh["tensor"] > 1 else (True,)
        layouts += [layout for layout in layouts_on(config, mesh, choices) if is_legal(layout)]
    return layouts


def meshes(devices: int) -> Iterator[dict[str, int]]:
    """Yield every mesh of `devices` devices."""
    for sizes in _factorizations(devices, len(AXES)):
        yield dict(zip(AXES, sizes, strict=True))


def legality(model: ModelConfig, devices: int) -> Callable[[Config], bool]:
    """Return a test of layouts: their numbers must fit together, and the sharding rules must divide all weights."""
    # The vocabulary excludes no layout, because training pads it for the layout.
    padded = fit_vocabulary(model, ParallelConfig(tensor=devices))

    @cache
    def divides(sizes: tuple[int, ...], zero: int, whole_heads: bool) -> bool:
        try:
            divide_weights(padded, sizes, zero, whole_heads)
        except InputError:
            return False
        return True

    def is_legal(layout: Config) -> bool:
        try:
            check_config(layout)
        except InputError:
            return False
        return divides(tuple(layout.parallel.sizes.values()), layout.parallel.zero, layout.parallel.whole_heads)

    return is_legal


def divide_weights(model: ModelConfig, sizes: tuple[int, ...], zero: int, whole_heads: bool = False) -> None:
    """Refuse a mesh, given by the sizes of all AXES, that does not divide every weight.

    Raises:
        InputError: a weight is not divided; the message names it, its dimension and the mesh axes.
    """
    mesh = AbstractMesh(sizes, AXES, axis_types=(AxisType.Auto,) * len(AXES))
    rules = replace(Rules.of(mesh, ParallelConfig(whole_heads=whole_heads), model), zero=zero)
    rules.shardings(_abstract_weights(model))


@lru_cache(maxsize=32)
def _abstract_weights(model: ModelConfig) -> Model:
    return jax.eval_shape(lambda: build_model(jax.random.key(0), model))


def layout_name(layout: Config) -> str:
    """Return the settings in which a layout differs from others: `pipe=2 data=4 remat=full microbatches=2`."""
    parallel, remat = layout.parallel, layout.train.remat
    sizes = {**parallel.sizes, "chunks": parallel.chunks}
    words: dict[str, object] = {key: size for key, size in sizes.items() if size > 1}
    if parallel.zero:
        words["zero"] = parallel.zero
    if parallel.tensor > 1:
        words["sequence"] = "on" if parallel.sequence_parallel else "off"
    if parallel.whole_heads:
        words["heads"] = "whole"
    if layout.train.attention == "ring":
        words["attention"] = "ring"
    words["remat"] = remat if isinstance(remat, str) else "+".join(remat)
    words["microbatches"] = Device.of(layout).microbatches
    return " ".join(f"{key}={value}" for key, value in words.items())


def layouts_on(config: Config, mesh: Mapping[str, int], sequence_parallel: Sequence[bool]) -> Iterator[Config]:
    """Yield the layouts of a mesh, legal or not, with all chunks per stage, ZeRO, and given choices of sequence
    parallelism.
    """
    chunks = _divisors(config.model.num_layers // mesh["pipe"]) if mesh["pipe"] > 1 else [1]
    zero: tuple[Literal[0, 1], ...] = (0, 1) if mesh["data"] > 1 else (0,)
    samples = Device(config, mesh).samples
    ring = config.train.attention == "ring" and mesh["context"] == 1
    train = replace(
        config.train,
        micro_batch_size=gcd(config.train.micro_batch_size, samples),
        attention="auto" if ring else config.train.attention,
    )
    for c, z, s in product(chunks, zero, sequence_parallel):
        parallel = ParallelConfig(**mesh, chunks=c, zero=z, sequence_parallel=s, whole_heads=False)
        yield replace(config, train=train, parallel=parallel)


def _divisors(number: int) -> list[int]:
    return [divisor for divisor in range(1, number + 1) if number % divisor == 0]


def _factorizations(number: int, parts: int) -> Iterator[tuple[int, ...]]:
    """Yield every way to write a number as a product of `parts` factors, in order."""
    if parts == 1:
        yield (number,)
        return
    for first in _divisors(number):
        for rest in _factorizations(number // first, parts - 1):
            yield (first, *rest)
