"""Search for the fastest layout on a number of GPUs: legal layouts, pruned by memory, ranked by predicted step time.

    ranking = search_layouts(config, gpu_named("h100"), 1024)
    ranking[0].config.parallel, ranking[0].time.seconds     # the best
    ranking[1].verdict                                      # "2 % slower: pipeline bubble"

A layout is a mesh, chunks per stage and ZeRO; each gets the micro batch and the recomputation with which it is fastest
and fits. Nothing is compiled and no device is needed.

`smallest_remedy` stays near a plan that does not fit: it finds the fewest keys to change, and among such changes the
fastest step. On the same GPUs a change is a smaller micro batch, more recomputation, ZeRO-1, more chunks per stage, or
a factor moved from one mesh axis to another; if none of these fits, the change adds GPUs as well.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import combinations, groupby, product
from typing import Any, Literal

from megajax.config import Config, InputError, ParallelConfig
from megajax.config.parallel import AXES, fit_vocabulary
from megajax.costs.device import Device
from megajax.costs.hardware import Gpu
from megajax.costs.memory import GIB, heaviest
from megajax.planning.layouts import layouts_on, legality, meshes
from megajax.planning.plan import Plan, plan
from megajax.planning.roofline import LABELS, StepTime, step_time

MICRO_BATCHES = (1, 2, 4, 8, 16)


@dataclass(frozen=True)
class Candidate:
    """A layout of a search by its memory, time and verdict."""

    config: Config
    mesh: Mapping[str, int]
    memory: float
    """Bytes that the fullest device needs."""
    time: StepTime | None
    """Predicted time of a step; None = the layout does not fit."""
    verdict: str
    """Reason why the layout won or lost."""


def search_layouts(config: Config, gpu: Gpu, gpus: int, tensor_across_nodes: bool = False) -> list[Candidate]:
    """Return every legal layout of `gpus` GPUs, fastest first, followed by those that do not fit, smallest first.

    Args:
        config: configuration with model (of known vocabulary), data and batch; its layout, micro batch and
            recomputation are ignored.
        gpu: type of GPU.
        gpus: number of GPUs.
        tensor_across_nodes: whether to try tensor parallelism over the network too, which is rarely faster.

    Raises:
        InputError: no layout divides model and batch.
    """
    widest = gpus if tensor_across_nodes else gpu.link_domain
    is_legal = legality(config.model, gpus)
    candidates = []
    for mesh in meshes(gpus):
        if mesh["tensor"] > widest:
            continue
        by_layout = sorted(_layouts(config, mesh, is_legal), key=_layout)
        candidates += [_best_variant(list(variants), mesh, gpu) for _, variants in groupby(by_layout, _layout)]
    if not candidates:
        raise InputError(
            f"no layout of {gpus} GPUs divides the model and train.global_batch_size "
            f"{config.train.global_batch_size}: change the batch, or the number of GPUs"
        )
    return _judged(candidates, gpu)


def _layouts(config: Config, mesh: Mapping[str, int], is_legal: Callable[[Config], bool]) -> Iterator[Config]:
    """Yield the legal layouts of a mesh with every micro batch, small ones first."""
    # Sequence parallelism costs nothing where it is possible.
    sequence_parallel = config.data.seq_length % (mesh["context"] * mesh["tensor"]) == 0
    parallel = ParallelConfig(**mesh, zero=0, whole_heads=False, sequence_parallel=sequence_parallel)
    train = replace(config.train, micro_batch_size=1)
    config = replace(config, model=fit_vocabulary(config.model, parallel), train=train, parallel=parallel)
    if config.train.attention == "cudnn" and mesh["context"] > 1:
        return
    if not is_legal(config):  # then no variant with more chunks or ZeRO is legal
        return
    for size in MICRO_BATCHES:
        if Device(config, mesh).samples % size == 0:
            sized = replace(config, train=replace(train, micro_batch_size=size))
            yield from filter(is_legal, layouts_on(sized, mesh, (sequence_parallel,)))


def _layout(config: Config) -> tuple[int, int]:
    return config.parallel.chunks, config.parallel.zero


def _best_variant(layouts: list[Config], mesh: Mapping[str, int], gpu: Gpu) -> Candidate:
    """Return the fastest of one layout's micro batches and recomputations that fits, or the smallest if none does."""
    tried: list[Candidate] = []
    for layout in layouts:
        selective = _candidate(layout, "selective", mesh, gpu)
        other = _candidate(layout, "none" if selective.time else "full", mesh, gpu)
        tried += [selective, other]
        if not (selective.time or other.time):  # larger micro batches need more memory
            break
    return min(tried, key=_rank)


def _candidate(
    layout: Config, remat: Literal["none", "selective", "full"], mesh: Mapping[str, int], gpu: Gpu
) -> Candidate:
    config = replace(layout, train=replace(layout.train, remat=remat))
    need = heaviest(config, mesh).total
    return Candidate(config, mesh, need, step_time(config, mesh, gpu) if need <= gpu.array_bytes else None, "")


def _rank(candidate: Candidate) -> tuple[float, float]:
    return (candidate.time.seconds if candidate.time else math.inf, candidate.memory)


def _judged(candidates: list[Candidate], gpu: Gpu) -> list[Candidate]:
    ranking = sorted(candidates, key=_rank)
    fastest = ranking[0].time
    return [replace(candidate, verdict=_verdict(candidate, fastest, gpu)) for candidate in ranking]


def _verdict(candidate: Candidate, fastest: StepTime | None, gpu: Gpu) -> str:
    if candidate.time is None or fastest is None:
        return f"does not fit: {candidate.memory / GIB:.0f} of {gpu.array_bytes / GIB:.0f} GiB"
    if candidate.time is fastest:
        return "fastest"
    losses = {name: seconds - fastest.parts[name] for name, seconds in candidate.time.parts.items()}
    slower = candidate.time.seconds / fastest.seconds - 1
    return f"{100 * slower:.1f} % slower: {LABELS[max(losses, key=losses.__getitem__)]}"


MOST_CHANGES = 3
SMALLEST_STATE = 8
"""Bytes of weights and optimizer state per parameter that every layout needs at least, over all its devices."""
MOVES = (2, 4, 8)
"""Factors that may move from one mesh axis to another."""
Values = Mapping[str, Any]
"""Configuration keys, or mesh axes -> their new values."""


def smallest_remedy(failed: Plan) -> tuple[str, Plan] | None:
    """Return the smallest change, as words of a command line, and the plan that then fits, or None if there is none
    nearby.

    Args:
        failed: plan that does not fit.
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
    """Yield the legal plans with `more` times the GPUs and `count` of the options chosen, with their changes."""
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
    """Return groups of changes, of which only one in each group can be made."""
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
    """Yield meshes of the same size with a factor moved from one axis to another, `tensor` inside a node."""
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
