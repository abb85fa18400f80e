"""The plan of one layout: memory and speed of a run, in closed form.

    planned = plan(config, gpu="h100", gpus=128)
    print(planned)                     # a table
    planned.fits, planned.time.seconds, planned.as_dict()

Nothing is compiled and no device is needed. `like="megatron"` is Megatron-LM's accounting of the same layout, for
comparison with published figures.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from megajax.config import Config, InputError, check_config, resolve_mesh
from megajax.config.parallel import AXES, fit_vocabulary
from megajax.costs.device import Device, Load
from megajax.costs.flops import AttentionConvention, Flops, count_flops
from megajax.costs.hardware import MEMORY_FRACTION, Gpu, gpu_named, memory_fraction, memory_variable
from megajax.costs.memory import GIB, StageMemory, describe_logits, logits_bytes, stage_memory
from megajax.costs.weights import parameter_count
from megajax.data.tokenizers import build_tokenizer
from megajax.planning.cut import MEGAJAX, MEGATRON
from megajax.planning.layouts import divide_weights, layout_name
from megajax.planning.megatron import check_like_megatron, megatron_memory
from megajax.planning.roofline import LABELS, StepTime, step_time
from megajax.planning.traffic import Sent, traffic_by_axis

Like = Literal["megajax", "megatron"]
CONVENTIONS: tuple[AttentionConvention, ...] = ("full", "causal")
TOKENS = 300e9
"""Default of the token budget: that of GPT-3 (2005.14165)."""


@dataclass(frozen=True)
class Plan:
    """The plan of one layout on one type of GPU."""

    config: Config
    """Configuration with the mesh in `parallel` and a padded vocabulary."""
    mesh: Mapping[str, int]
    """Number of devices along every axis."""
    gpu: Gpu
    gpus: int
    like: Like
    """Program whose memory and step time are planned."""
    parameters: int
    """Number of parameters of the model, without the vocabulary's padding."""
    stages: Mapping[str, StageMemory]
    """Memory of a device of the "first", "middle" and "last" pipeline stage, which are the same without stages."""
    limit: float
    """Bytes of memory for arrays on a GPU."""
    logits: int
    """Bytes of all fp32 logits of a micro batch on a device, if they were held at once."""
    time: StepTime
    communication: Mapping[str, Sent]
    """Communication by mesh axis, without axes of a single device."""
    flops: Mapping[AttentionConvention, Flops]
    """FLOPs of a step on all devices, by attention convention."""
    hardware_flops: Mapping[AttentionConvention, int] | None
    """FLOPs of a step with recomputation; None = activations are recomputed by name, for which the papers have no
    formula.
    """
    bubble: float
    """Time that pipeline stages wait, divided by the time that they compute."""
    tokens: float
    """Token budget of the whole run."""

    @property
    def need(self) -> float:
        """Return the bytes that the fullest device needs."""
        return self.stages[self.fullest].total

    @property
    def fullest(self) -> str:
        """Return the key of the fullest device in `stages`."""
        return max(self.stages, key=lambda name: self.stages[name].total)

    @property
    def fits(self) -> bool:
        """Tell whether every device has enough memory."""
        return self.need <= self.limit

    @property
    def tokens_per_second(self) -> float:
        """Return the tokens per second of all devices together."""
        return self.time.tokens_per_second

    @property
    def days(self) -> float:
        """Return the days that the token budget takes without an interruption."""
        return self.time.days(self.tokens)

    @property
    def gpu_hours(self) -> float:
        """Return the GPU-hours that the token budget takes."""
        return self.time.gpu_hours(self.tokens)

    @property
    def load(self) -> Load | None:
        """Return the load of the experts with which a mixture is planned, or None if the model is no mixture."""
        return Device(self.config, self.mesh).load

    @property
    def uncounted(self) -> str | None:
        """Return in words the work that memory, time and communication leave out, or None if it is negligible."""
        if self.config.optim.name != "muon" or self.like == "megatron":
            return None
        return (
            "optim.name=muon: its matrix products, once a step, and what `fsdp`, `tensor` and `data` send for them are "
            "not counted: compile the step (--compile) to see them"
        )

    @property
    def verdict(self) -> str:
        """Return a text that tells whether the layout fits."""
        spare = (self.limit - self.need) / GIB
        given = memory_variable() if self.like == "megajax" else None
        why = f", as {given} is {memory_fraction():g}" if given else ""
        room = f"{self.limit / GIB:.1f} GiB that arrays can have ({self.gpu.name}{why})"
        return (
            f"fits: {spare:.1f} GiB left of the {room}"
            if self.fits
            else f"does not fit: {-spare:.1f} GiB over the {room}"
        )

    def as_dict(self) -> dict[str, Any]:
        """Return the plan with the stable keys documented by `planning.schema.SCHEMA`, sizes in bytes and times in
        seconds.
        """
        parallel, train, time = self.config.parallel, self.config.train, self.time
        return {
            "gpu": {"name": self.gpu.name, "memory_bytes": self.gpu.memory_bytes},
            "gpus": self.gpus,
            "like": self.like,
            "parameters": self.parameters,
            "layout": {
                "name": layout_name(self.config),
                "mesh": dict(self.mesh),
                "chunks": parallel.chunks,
                "zero": parallel.zero,
                "sequence_parallel": parallel.sequence_parallel,
                "micro_batch_size": train.micro_batch_size,
                "global_batch_size": train.global_batch_size,
                "sequence": self.config.data.seq_length,
                "remat": train.remat if isinstance(train.remat, str) else list(train.remat),
                "precision": train.precision,
            },
            "memory": {
                "fits": self.fits,
                "limit_bytes": self.limit,
                "need_bytes": self.need,
                "fullest_stage": self.fullest,
                "logits_bytes": self.logits,
                "stages": {name: vars(memory) | {"total": memory.total} for name, memory in self.stages.items()},
            },
            "step": {
                "seconds": time.seconds,
                "parts": dict(time.parts),
                "limit": time.limit,
                "tokens_per_second": self.tokens_per_second,
                "bubble_fraction": self.bubble,
                "hfu": time.hfu,
            },
            "flops": {
                convention: {
                    "model": flops.model,
                    "hardware": self.hardware_flops and self.hardware_flops[convention],
                    "tflops": time.tflops(convention),
                    "mfu": time.mfu(convention),
                }
                for convention, flops in self.flops.items()
            },
            "experts": self.load and self.load._asdict(),
            "uncounted": self.uncounted,
            "communication": {axis: {"bytes": sent.bytes} | vars(sent) for axis, sent in self.communication.items()},
            "budget": {"tokens": self.tokens, "days": self.days, "gpu_hours": self.gpu_hours},
        }

    def __str__(self) -> str:
        """Return tables of memory, time, communication and cost."""
        parts = (self._title(), self._memory(), self._step(), self._communication(), self._cost())
        notes = [f"experts: {self.load}"] if self.load else []
        return "\n\n".join((*parts, *notes, *([f"not planned: {self.uncounted}"] if self.uncounted else [])))

    def _title(self) -> str:
        train = self.config.train
        whose = "" if self.like == "megajax" else ", as Megatron-LM would hold and run it"
        return (
            f"{self.parameters:,} parameters in {train.precision} on {self.gpus:,} x {self.gpu.name}{whose}\n"
            f"{layout_name(self.config)} micro_batch={train.micro_batch_size}"
        )

    def _memory(self) -> str:
        rows = [("memory, GiB per GPU", *(f"{name} stage" for name in self.stages))]
        for name in (*vars(self.stages["first"]), "total"):
            cells = (f"{getattr(memory, name) / GIB:.2f}" for memory in self.stages.values())
            rows.append((f"  {name.replace('_', ' ')}", *cells))
        lines = [columns(rows), self.verdict]
        if self.like == "megajax":
            lines.append(f"logits {describe_logits(self.config, self.mesh, self.gpu.memory_bytes)}")
        return "\n".join(lines)

    def _step(self) -> str:
        time = self.time
        rows = [("step", f"{time.seconds:.3f} s", "")]
        parts = sorted(time.parts.items(), key=lambda part: -part[1])
        rows += [
            (f"  {LABELS[name]}", f"{seconds:.3f} s", f"{seconds / time.seconds:.1%}")
            for name, seconds in parts
            if seconds
        ]
        return columns(rows)

    def _communication(self) -> str:
        if not self.communication:
            return "a single GPU sends nothing"
        rows = [("communication", "GiB a step", "exposed", "wire")]
        for axis, sent in self.communication.items():
            rows.append((f"  {axis} {self.mesh[axis]}", f"{sent.bytes / GIB:,.2f}", f"{sent.seconds:.3f} s", sent.wire))
        return columns(rows)

    def _cost(self) -> str:
        rows = [("FLOPs", "model", "hardware", "TFLOP/s per GPU", "MFU")]
        for convention, flops in self.flops.items():
            hardware = f"{self.hardware_flops[convention]:.4g}" if self.hardware_flops else "-"
            speed = f"{self.time.tflops(convention):.0f}", f"{self.time.mfu(convention):.1%}"
            rows.append((f"  {convention} attention", f"{flops.model:.4g}", hardware, *speed))
        return (
            f"{columns(rows)}\npipeline bubble {self.bubble:.1%} of the ideal time\n"
            f"{self.tokens_per_second:,.0f} tokens/s; {self.tokens / 1e9:,.0f}B tokens take {self.days:,.1f} days, "
            f"{self.gpu_hours:,.0f} GPU-hours"
        )


def columns(rows: Sequence[Sequence[str]], left: Sequence[int] = (0,)) -> str:
    """Return cells in aligned columns, right-aligned except at the positions `left`."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    aligns = ["<" if i in left else ">" for i in range(len(widths))]
    lines = ([f"{cell:{a}{w}}" for cell, a, w in zip(row, aligns, widths, strict=True)] for row in rows)
    return "\n".join("  ".join(line).rstrip() for line in lines)


def plan(
    config: Config, gpu: str | Gpu = "h100", gpus: int | None = None, like: Like = "megajax", tokens: float = TOKENS
) -> Plan:
    """Plan a layout.

    Args:
        config: configuration whose model or tokenizer gives the vocabulary size.
        gpu: name in `costs.hardware.GPUS`, or a `Gpu` of your own.
        gpus: number of GPUs; unset, those of one replica times `parallel.data`.
        like: program whose memory and time are planned: this repository, or Megatron-LM, of which most published
            figures are.
        tokens: token budget of the whole run.

    Raises:
        InputError: the GPU is unknown, Megatron-LM's accounting lacks the kind of model, or mesh, batch and model do
            not divide.
    """
    if not tokens > 0:
        raise InputError(f"tokens is {tokens:g}: expected more than 0")
    if like == "megatron":
        check_like_megatron(config)
    gpu = gpu_named(gpu) if isinstance(gpu, str) else gpu
    config, mesh = on_gpus(config, gpus)
    stages = {"first": 0, "middle": mesh["pipe"] // 2, "last": mesh["pipe"] - 1}
    account = stage_memory if like == "megajax" else megatron_memory
    time = step_time(config, mesh, gpu, trainer := MEGAJAX if like == "megajax" else MEGATRON)
    batch, sequence, remat = config.train.global_batch_size, config.data.seq_length, config.train.remat
    flops = {c: count_flops(config.model, batch, sequence, c, time.decoder_sequence) for c in CONVENTIONS}
    return Plan(
        config=config,
        mesh=mesh,
        gpu=gpu,
        gpus=math.prod(mesh.values()),
        like=like,
        parameters=parameter_count(config.model),
        stages={name: account(config, mesh, stage) for name, stage in stages.items()},
        limit=gpu.array_bytes if like == "megajax" else MEMORY_FRACTION * gpu.memory_bytes,  # JAX's variables
        logits=logits_bytes(config, mesh),
        time=time,
        communication=traffic_by_axis(config, mesh, gpu, trainer, time),
        flops=flops,
        hardware_flops={c: f.hardware(remat) for c, f in flops.items()} if isinstance(remat, str) else None,
        bubble=(mesh["pipe"] - 1) / (config.parallel.chunks * Device.of(config).microbatches),
        tokens=tokens,
    )


def on_gpus(config: Config, gpus: int | None = None) -> tuple[Config, dict[str, int]]:
    """Return the configuration, checked, with its mesh and padded vocabulary written out, and the mesh."""
    parallel = config.parallel
    if gpus is None:
        gpus = math.prod(size for axis in AXES if (size := getattr(parallel, axis)) != "auto")
    if gpus < 1:
        raise InputError(f"{gpus} GPUs cannot train: give 1 or more")
    mesh = resolve_mesh(parallel, gpus)
    config = with_vocabulary(replace(config, parallel=replace(parallel, data=mesh["data"])))
    check_config(config)
    divide_weights(config.model, tuple(mesh[axis] for axis in AXES), config.parallel.zero, config.parallel.whole_heads)
    return config, mesh


def with_vocabulary(config: Config) -> Config:
    """Set the model's vocabulary size from its tokenizer, padded as in training, even if that is not trained yet."""
    model, tokenizer, parallel = config.model, config.tokenizer, config.parallel
    size = model.vocab_size
    if size is None and tokenizer.type == "sentencepiece" and tokenizer.model is None:
        size = tokenizer.vocab_size
    elif size is None:
        try:
            size = build_tokenizer(tokenizer).vocab_size
        except InputError as error:
            raise InputError(f"model.vocab_size is not known: set it, or give a tokenizer ({error})") from error
    return replace(config, model=fit_vocabulary(replace(model, vocab_size=size), parallel))
