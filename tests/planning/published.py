"""GPU memory that others measured, as rows with which `megajax.planning.megatron` is compared.

Megatron-LM  golden values of its functional tests: `torch.cuda.max_memory_allocated`, and what is held between steps
nanotron     docs/benchmark_summary.svg, of the Ultra-Scale Playbook; allocated or reserved, it does not say
BLOOM        bigscience's chronicles-prequel.md (Megatron-DeepSpeed, 2022): nvidia-smi, on nodes with the embedding

Left out: mixtures of experts, fp8 and LoRA, which the closed form does not cover.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

from megajax.config import Config, DataConfig, ModelConfig, ParallelConfig, TrainConfig
from megajax.config.parallel import AXES
from megajax.costs.memory import GIB
from megajax.planning.megatron import MEGATRON_LM, Practice, megatron_memory

NANOTRON = Practice(gradients=6, logits=10, swiglu=8, keeps_gathered=True)
"""bf16 gradients next to their fp32 sums; loss and MLP are not fused."""
DEEPSPEED_FP16 = Practice(gradients=2, moments=12, logits=10)
"""fp16 gradients; a shard's fp32 gradients live next to its moments."""
DEEPSPEED_BF16 = Practice(gradients=6, logits=10)
"""bf16 gradients next to their fp32 sums."""

FRAGMENTATION = 1.06
"""Reserved over allocated bytes of PyTorch's allocator, median of six runs of Megatron-Bridge's model cards (70.34 /
58.08, 73.89 / 68.55, 75.34 / 72.07, 161.26 / 156.85, 72.36 / 65.22, 45.64 / 44.25)."""
OUTSIDE = 3.0 * GIB
"""CUDA context of PyTorch before 2.1 (1.3-1.6 GiB) and NCCL (1-2 GiB): Bekman's ML Engineering."""


class Row(NamedTuple):
    """One measurement."""

    source: str
    name: str
    measured: float
    config: Config
    practice: Practice = MEGATRON_LM
    steady: bool = False
    """Between steps."""

    @property
    def predicted(self) -> float:
        """In the unit of `measured`: GiB, or what nvidia-smi shows in thousands of MiB."""
        mesh = {axis: getattr(self.config.parallel, axis) for axis in AXES}
        stages = [megatron_memory(self.config, mesh, stage, self.practice) for stage in range(mesh["pipe"])]
        if self.steady:
            return max(m.persistent + m.gradients + m.compute_copy for m in stages) / GIB
        most = max(memory.total for memory in stages)
        return (most * FRAGMENTATION + OUTSIDE) / (1000 * 2**20) if self.source == "BLOOM" else most / GIB

    @property
    def error(self) -> float:
        """Relative, positive if too much is predicted."""
        return self.predicted / self.measured - 1


def published() -> list[Row]:
    """All rows."""
    return [*_megatron_lm(), *_nanotron(), *_bloom()]


GPT_7B = ModelConfig(
    num_layers=32,
    hidden_size=4096,
    num_heads=32,
    num_kv_heads=8,
    max_positions=8192,
    vocab_size=131_073,
    tied_head=False,
    hidden_dropout=0.1,
)
GPT_15B = replace(
    GPT_7B, hidden_size=6144, num_heads=48, vocab_size=256_000, positions="rope", bias=False, hidden_dropout=0.0
)


def _megatron_lm() -> Iterator[Row]:
    """GPUs of each name: peak and steady GiB. Of the 15B runs the number of GPUs is not given: chosen by step time."""
    runs = {
        "7B t4": (
            _config(GPT_7B, 8192, (4, 1, 2), 2, 2, sequence_parallel=False),
            {"H100": (53.22, 19.24), "A100": (54.19, 19.22), "GB200": (54.22, 19.24)},
        ),
        "7B p4 v8": (
            _config(GPT_7B, 8192, (1, 4, 2), 1, 4, chunks=8, sequence_parallel=False),
            {"H100": (56.55, 23.11), "A100": (56.33, 22.83), "GB200": (56.36, 22.85)},
        ),
        "15B t8": (_config(GPT_15B, 4096, (8, 1, 32), 4, 3), {"H100": (26.23, 12.36), "A100": (26.44, 11.83)}),
        "15B t4 p2 v8": (_config(GPT_15B, 4096, (4, 2, 8), 4, 12, chunks=8), {"GB200": (39.71, 13.69)}),
    }
    for name, (config, gpus) in runs.items():
        for gpu, (peak, steady) in gpus.items():
            yield Row("Megatron-LM", f"{name} {gpu}", peak, config)
            yield Row("Megatron-LM", f"{name} {gpu} steady", steady, config, steady=True)


LLAMA_1B = ModelConfig(
    num_layers=16,
    hidden_size=2048,
    num_heads=32,
    ffn_hidden_size=8192,
    activation="swiglu",
    norm="rmsnorm",
    positions="rope",
    bias=False,
    max_positions=4096,
    vocab_size=131_072,
)
LLAMA_9B = replace(LLAMA_1B, num_layers=32, hidden_size=4096, ffn_hidden_size=14_336, tied_head=False)


def _nanotron() -> Iterator[Row]:
    """data, tensor, pipe, accumulations, micro batch, ZeRO stage, measured."""
    runs = {
        "1.34B": (
            (4, 1, 2, 16, 4, 1, 41.76),
            (8, 1, 2, 32, 1, 1, 19.45),
            (16, 1, 2, 16, 1, 1, 16.39),
            (32, 1, 2, 8, 1, 1, 16.27),
            (64, 2, 1, 1, 4, 0, 38.84),
            (64, 4, 1, 1, 4, 0, 19.57),
            (128, 2, 2, 1, 2, 1, 8.40),
        ),
        "8.86B": (
            (2, 1, 4, 128, 1, 1, 63.07),
            (4, 4, 1, 16, 4, 1, 58.34),
            (16, 1, 2, 16, 1, 1, 61.10),
            (32, 1, 2, 8, 1, 1, 59.09),
            (16, 8, 1, 2, 8, 0, 66.88),
            (32, 8, 1, 1, 8, 0, 63.39),
            (128, 4, 1, 1, 2, 0, 57.76),
        ),
    }
    for size, model in (("1.34B", LLAMA_1B), ("8.86B", LLAMA_9B)):
        for data, tensor, pipe, microbatches, micro, zero, measured in runs[size]:
            config = _config(model, 4096, (tensor, pipe, data), micro, microbatches, zero=zero)
            name = f"{size} t{tensor} p{pipe} d{data} b{micro} m{microbatches} zero {zero}"
            yield Row("nanotron", name, measured, config, NANOTRON)


BLOOM = (
    # layers, width, heads; tensor, pipe, data; {micro batch: measured}
    ((8, 14400, 32), (8, 1, 1), {1: 67}),
    ((80, 14400, 96), (8, 10, 1), {1: 73}),
    ((80, 14400, 96), (8, 10, 2), {1: 51}),
    ((80, 14400, 96), (8, 4, 12), {1: 47}),
    ((80, 14400, 96), (8, 5, 9), {1: 44}),
    ((77, 14400, 96), (8, 7, 6), {1: 39}),
    ((80, 14400, 96), (8, 8, 6), {1: 36}),
    ((81, 14400, 96), (8, 9, 5), {1: 37}),
    ((78, 14400, 96), (8, 6, 8), {1: 39, 2: 45, 4: 56, 8: 75}),
    ((80, 14400, 96), (8, 10, 4), {1: 35, 2: 43, 4: 55, 8: 76}),
    ((77, 14400, 96), (8, 11, 4), {1: 32, 2: 41, 4: 53, 8: 75}),
    ((72, 14400, 96), (8, 12, 4), {1: 30, 2: 39, 4: 50}),
    ((80, 13824, 96), (8, 10, 4), {1: 33, 2: 39, 4: 53, 8: 73}),
    ((72, 14336, 64), (8, 12, 4), {1: 29, 2: 37, 4: 49, 8: 69}),
    ((72, 14336, 64), (8, 6, 8), {1: 38, 2: 44, 4: 56, 6: 66}),
    ((84, 13824, 64), (8, 12, 4), {2: 39, 4: 52}),
    ((84, 13824, 64), (8, 6, 8), {4: 56}),
    ((6, 14336, 64), (8, 1, 1), {2: 54}),
    ((10, 14336, 64), (8, 1, 1), {1: 80}),
    ((72, 14336, 64), (8, 8, 6), {4: 52}),
    ((72, 14336, 64), (8, 4, 12), {2: 53, 4: 59}),
    ((72, 14336, 64), (8, 2, 24), {1: 65, 2: 76}),
    ((72, 14336, 64), (4, 12, 8), {2: 44, 4: 60}),
    ((72, 14336, 64), (4, 6, 16), {2: 57, 4: 75}),
    ((72, 14336, 64), (2, 12, 16), {2: 63}),
    ((72, 14336, 64), (2, 24, 8), {1: 44, 2: 53}),
    ((96, 12288, 96), (1, 48, 8), {1: 58}),
    ((78, 13824, 96), (4, 12, 8), {2: 48}),
    ((78, 13824, 96), (8, 6, 8), {4: 59}),
    ((78, 13824, 96), (4, 6, 16), {4: 75}),
    ((106, 12288, 96), (4, 12, 8), {2: 44}),
)
BLOOM_ZERO_0 = (((72, 14336, 64), (8, 12, 4), {2: 72}),)
BLOOM_BF16 = (
    ((106, 12288, 96), (4, 12, 8), {2: 65, 4: 79}),
    ((100, 12288, 64), (8, 6, 8), {2: 61, 4: 72}),
    ((70, 14336, 64), (8, 12, 4), {2: 40}),
)


def _bloom() -> Iterator[Row]:
    """S = 2048, vocabulary 250,680, every layer recomputed, microbatches enough to fill the pipeline."""
    groups = (
        ("fp16", DEEPSPEED_FP16, 1, BLOOM),
        ("fp16 zero 0", DEEPSPEED_FP16, 0, BLOOM_ZERO_0),
        ("bf16", DEEPSPEED_BF16, 1, BLOOM_BF16),
    )
    for group, practice, zero, runs in groups:
        for (layers, width, heads), degrees, measurements in runs:
            model = ModelConfig(
                num_layers=layers,
                hidden_size=width,
                num_heads=heads,
                max_positions=2048,
                vocab_size=250_680,
                attention_dropout=0.1,
                hidden_dropout=0.1,
            )
            for micro, measured in measurements.items():
                config = _config(model, 2048, degrees, micro, 64, zero=zero, sequence_parallel=False)
                config = replace(config, train=replace(config.train, remat="full", attention="xla"))
                tensor, pipe, data = degrees
                name = f"{layers} x {width} t{tensor} p{pipe} d{data} b{micro} {group}"
                yield Row("BLOOM", name, measured, config, practice)


def _config(
    model: ModelConfig,
    sequence: int,
    degrees: tuple[int, int, int],
    micro: int,
    microbatches: int,
    *,
    zero: int = 1,
    chunks: int = 1,
    sequence_parallel: bool = True,
) -> Config:
    """`degrees`: tensor, pipe, data."""
    tensor, pipe, data = degrees
    return Config(
        model=model,
        data=DataConfig(seq_length=sequence),
        train=TrainConfig(micro_batch_size=micro, global_batch_size=micro * microbatches * data, remat="none"),
        parallel=ParallelConfig(
            tensor=tensor,
            pipe=pipe,
            data=data,
            chunks=chunks,
            zero=1 if zero else 0,
            sequence_parallel=sequence_parallel,
        ),
    )
