"""The fastest layout of a model on so many GPUs: every legal one, pruned by memory, ranked by predicted step time.

    ranking = search_layouts(config, gpu_named("h100"), 1024)
    ranking[0].config.parallel, ranking[0].time.seconds     # the best
    ranking[1].verdict                                      # "2 % slower: pipeline bubble"

A layout is a mesh, chunks per stage and ZeRO; each comes with the micro batch and the recomputation that make it
fastest among those that fit. Nothing is compiled, no device is needed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Literal

from megajax.config import Config, InputError, ParallelConfig
from megajax.config.parallel import fit_vocabulary
from megajax.costs.device import Device
from megajax.costs.hardware import Gpu
from megajax.costs.memory import GIB, heaviest
from megajax.planning.layouts import layouts_on, legality, meshes
from megajax.planning.roofline import LABELS, StepTime, step_time

MICRO_BATCHES = (1, 2, 4, 8, 16)


@dataclass(frozen=True)
class Candidate:
    """One layout and how it fared."""

    config: Config
    mesh: Mapping[str, int]
    memory: float
    """Bytes needed on the fullest device."""
    time: StepTime | None
    """None = does not fit."""
    verdict: str
    """Why it won or lost."""


def search_layouts(config: Config, gpu: Gpu, gpus: int, tensor_across_nodes: bool = False) -> list[Candidate]:
    """Every legal layout of `gpus` GPUs: the fastest first; last those that do not fit, the smallest first.

    Args:
        config: the model (with a known vocabulary), data and batch; its own layout, micro batch and recomputation are
            ignored.
        gpu: which one.
        gpus: how many.
        tensor_across_nodes: also try tensor parallelism over the network, which is hardly ever faster.

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
    """The legal layouts of a mesh with every micro batch, the small ones first."""
    # Sequence parallelism costs nothing where it can be had.
    sequence_parallel = config.data.seq_length % (mesh["context"] * mesh["tensor"]) == 0
    parallel = ParallelConfig(**mesh, zero=0, whole_heads=False, sequence_parallel=sequence_parallel)
    train = replace(config.train, micro_batch_size=1)
    config = replace(config, model=fit_vocabulary(config.model, parallel), train=train, parallel=parallel)
    if config.train.attention == "cudnn" and mesh["context"] > 1:
        return
    if not is_legal(config):  # then nothing is that asks for more
        return
    for size in MICRO_BATCHES:
        if Device(config, mesh).samples % size == 0:
            sized = replace(config, train=replace(train, micro_batch_size=size))
            yield from filter(is_legal, layouts_on(sized, mesh, (sequence_parallel,)))


def _layout(config: Config) -> tuple[int, int]:
    return config.parallel.chunks, config.parallel.zero


def _best_variant(layouts: list[Config], mesh: Mapping[str, int], gpu: Gpu) -> Candidate:
    """The fastest of one layout's micro batches and recomputations that fits, or if none does the smallest."""
    tried: list[Candidate] = []
    for layout in layouts:
        selective = _candidate(layout, "selective", mesh, gpu)
        other = _candidate(layout, "none" if selective.time else "full", mesh, gpu)
        tried += [selective, other]
        if not (selective.time or other.time):  # larger micro batches need more
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
