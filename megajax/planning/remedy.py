"""The smallest change that makes a plan fit: fewest keys, and among those the fastest step.

On the same GPUs a change is a smaller micro batch, more recomputation, ZeRO-1, more chunks per stage, or a factor moved
from one mesh axis to another; where none of these fit, it is more GPUs as well.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import combinations, product
from typing import Any

from megajax.config import Config, InputError
from megajax.config.parallel import AXES
from megajax.planning.plan import Plan, plan

MOST_CHANGES = 3
SMALLEST_STATE = 8
"""Bytes of a parameter and its optimizer state that no layout can do without."""
MOVES = (2, 4, 8)
"""Factors that move from one mesh axis to another."""
Values = Mapping[str, Any]
"""Configuration keys, or mesh axes, and what to set them to."""


def smallest_remedy(failed: Plan) -> tuple[str, Plan] | None:
    """What to change, as words of a command line, and the plan that fits; None = nothing near does.

    Args:
        failed: does not fit.
    """
    for more in (1, 2, 4, 8, 16, 32, 64):
        if SMALLEST_STATE * failed.parameters > more * failed.gpus * failed.limit:
            continue
        for count in range(0 if more > 1 else 1, MOST_CHANGES + 1):
            fitting = [(values, planned) for values, planned in _changed(failed, more, count) if planned.fits]
            if fitting:
                values, best = min(fitting, key=lambda pair: pair[1].time.seconds)
                gpus = [f"--gpus {best.gpus}"] if more > 1 else []
                return " ".join([*gpus, *(f"{key}={value}" for key, value in values.items())]), best
    return None


def _changed(failed: Plan, more: int, count: int) -> Iterator[tuple[Values, Plan]]:
    """Plans with `more` times the GPUs and so many of the options taken; those that are not legal are left out."""
    mesh = {**failed.mesh, "data": failed.mesh["data"] * more}
    for options in combinations(_options(failed, mesh), count):
        for choice in product(*options):
            values: dict[str, Any] = {"parallel.data": mesh["data"]} if more > 1 else {}
            for change in choice:
                values |= change
            try:
                config = _set(failed.config, values)
                yield values, plan(config, failed.gpu, failed.gpus * more, failed.like, failed.tokens)
            except InputError:
                continue


def _options(failed: Plan, mesh: Values) -> list[list[Values]]:
    """Groups of changes that exclude one another."""
    train, parallel = failed.config.train, failed.config.parallel
    halves = [train.micro_batch_size >> n for n in range(1, train.micro_batch_size.bit_length())]
    stronger = {"none": ["selective", "full"], "full": []}.get(str(train.remat), ["full"])
    zero: list[Values] = [{"parallel.zero": 1}] if not parallel.zero and mesh["data"] > 1 else []
    chunks: list[Values] = [{"parallel.chunks": n} for n in (2, 3, 4) if mesh["pipe"] > 1 and n > parallel.chunks]
    groups: list[list[Values]] = [
        [{"train.micro_batch_size": size} for size in halves],
        [{"train.remat": remat} for remat in stronger],
        zero,
        chunks,
        list(_moves(mesh, failed.gpu.link_domain, ("expert",) if failed.config.model.experts else ())),
    ]
    return [group for group in groups if group]


def _moves(mesh: Values, widest: int, more: tuple[str, ...]) -> Iterator[Values]:
    """Meshes as large with a factor moved from one axis to another, tensor parallelism inside a node."""
    for (source, target), factor in product(product(AXES, ("fsdp", "tensor", "pipe", "context", *more)), MOVES):
        if source != target and mesh[source] % factor == 0:
            sizes = {source: mesh[source] // factor, target: mesh[target] * factor}
            if sizes.get("tensor", 1) <= widest:
                yield {f"parallel.{axis}": size for axis, size in sizes.items()}


def _set(config: Config, values: Values) -> Config:
    sections: dict[str, dict[str, Any]] = {"parallel": {}, "train": {}}
    for key, value in values.items():
        section, name = key.split(".")
        sections[section][name] = value
    return replace(
        config,
        parallel=replace(config.parallel, **sections["parallel"]),
        train=replace(config.train, **sections["train"]),
    )
