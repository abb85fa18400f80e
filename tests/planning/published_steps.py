"""Step times that others measured, as rows with which `megajax.planning.roofline` is compared.

Papers    2104.04473 table 1 (V2), 2205.05198 table 5 (V3): A100s, fp16, attention not fused, dropout
README    Megatron-LM's README since July 2024: H100s, from TFLOP/s with full attention
dgxc      NVIDIA/dgxc-benchmarking, READMEs of 24.11 to 25.05: NeMo (Megatron-LM), MaxText and Paxml on H100s
Toolbox   NVIDIA/JAX-Toolbox, READMEs of Pax and MaxText;  A3: google/maxtext, configs/a3 (8 H100s share 100 GB/s)
AXLearn   2507.05411, table 3;  JaxPP: 2412.14374, table 1, from memory

The programs differ only by facts (`Trainer`). Recomputation, micro batches and meshes are the published ones, unless a
comment says that they are not known. JAX programs are predicted like this repository, which is one.
"""

from __future__ import annotations

from dataclasses import replace
from math import prod
from typing import Any, NamedTuple

from megajax.config import Config, DataConfig, ModelConfig, ParallelConfig, TrainConfig
from megajax.config.parallel import AXES, fit_vocabulary
from megajax.costs.flops import count_flops
from megajax.costs.hardware import Gpu, gpu_named
from megajax.planning.cut import MEGAJAX, MEGATRON, Trainer
from megajax.planning.roofline import StepTime, step_time

A100, H100 = gpu_named("A100-80GB"), gpu_named("H100")
NEMO = replace(MEGATRON, gradient_bytes=2)
"""Sends gradients in bf16."""
MEGATRON_2022 = replace(
    MEGATRON, hides_tensor="backward", hides_data=False, gradient_bytes=2, score_bytes=(13, 19), logit_bytes=48
)
"""fp16 gradients; dropout passes over the scores once more."""
MEGATRON_2021 = replace(MEGATRON_2022, hides_tensor="nothing", hides_neighbours=False, sum_bytes=6)
UNROLLED = replace(MEGAJAX, scans_layers=False)
TE_SCORES = MEGATRON.score_bytes
"""Transformer Engine in 2023: a fused softmax over 16-bit scores, as in Megatron-LM."""

# What JAX programs keep, in our names. MaxText: save_qkv_proj. Paxml: SAVE_QKV_OUT_PROJ, and what is no fused attention
# (SAVE_DOT_ONLY). AXLearn: projections and attention.
KEEP_QKV = ("block_input", "qkv")
KEEP_PROJECTIONS = (*KEEP_QKV, "attention_residual")
KEEP_PRODUCTS = (*KEEP_PROJECTIONS, "mlp_hidden")
KEEP_ATTENTION = (*KEEP_PROJECTIONS, "attention_out")


class Row(NamedTuple):
    """One measurement."""

    source: str
    name: str
    measured: float
    """Seconds."""
    config: Config
    mesh: dict[str, int]
    gpu: Gpu
    trainer: Trainer

    @property
    def program(self) -> str:
        return "JAX" if self.trainer.name == MEGAJAX.name else self.trainer.name

    @property
    def predicted(self) -> StepTime:
        return step_time(self.config, self.mesh, self.gpu, self.trainer)


def gpt(layers: int, hidden: int, heads: int, vocab: int = 51_200, sequence: int = 2048, **more: Any) -> ModelConfig:
    return ModelConfig(
        num_layers=layers, hidden_size=hidden, num_heads=heads, vocab_size=vocab, max_positions=sequence, **more
    )


def llama(layers: int, hidden: int, heads: int, groups: int, ffn: int, vocab: int, sequence: int) -> ModelConfig:
    switches: dict[str, Any] = {"activation": "swiglu", "norm": "rmsnorm", "positions": "rope", "bias": False}
    sizes: dict[str, Any] = {"num_kv_heads": groups, "ffn_hidden_size": ffn, "tied_head": False}
    return gpt(layers, hidden, heads, vocab, sequence, **switches, **sizes)


def nemotron(layers: int, hidden: int, heads: int, groups: int) -> ModelConfig:
    return gpt(layers, hidden, heads, 256_000, 4096, num_kv_heads=groups, positions="rope", bias=False, tied_head=False)


def row(  # noqa: PLR0917
    source: str,
    name: str,
    seconds: float,
    model: ModelConfig,
    gpus: int,
    batch: int,
    micro: int = 1,
    gpu: Gpu = H100,
    trainer: Trainer = MEGATRON,
    fp8: bool = False,
    remat: str | tuple[str, ...] = "selective",
    attention: str = "auto",
    zero: int = 1,
    sequence_parallel: bool = True,
    chunks: int = 1,
    **axes: int,
) -> Row:
    """`axes`: sizes of mesh axes; `data` takes the GPUs that are left."""
    mesh = dict.fromkeys(AXES, 1) | axes
    mesh["data"] = gpus // prod(mesh.values())
    parallel = ParallelConfig(**mesh, chunks=chunks, zero=zero, sequence_parallel=sequence_parallel)
    train = TrainConfig(
        global_batch_size=batch, micro_batch_size=micro, precision="bf16", remat=remat, attention=attention
    )
    data = DataConfig(seq_length=model.max_positions)
    config = Config(model=fit_vocabulary(model, parallel), data=data, train=train, parallel=parallel)
    label = f"{name}{' fp8' * fp8} x{gpus}"
    return Row(source, label, seconds, config, mesh, gpu, replace(trainer, fp8=fp8))


def from_tflops(tflops: float, model: ModelConfig, gpus: int, batch: int) -> float:
    """Seconds from model TFLOP/s per GPU with full attention."""
    return count_flops(model, batch, model.max_positions, "full").model / (gpus * tflops * 1e12)


def papers() -> list[Row]:
    old: dict[str, Any] = {"gpu": A100, "attention": "xla", "zero": 0}
    v2 = [
        # seconds, layers, hidden, heads, GPUs, batch, micro batch, tensor, pipe, chunks
        (3.53, 24, 2304, 24, 32, 512, 16, 1, 1, 1),
        (3.70, 30, 3072, 32, 64, 512, 16, 2, 1, 1),
        (3.70, 36, 4096, 32, 128, 512, 16, 4, 1, 1),
        (9.40, 40, 6144, 48, 256, 1024, 8, 8, 1, 1),
        (14.45, 48, 8192, 64, 512, 1536, 4, 8, 2, 1),
        (16.06, 60, 10_240, 80, 1024, 1792, 2, 8, 4, 3),
        (24.82, 80, 12_288, 96, 1536, 2304, 2, 8, 8, 2),
        (37.61, 96, 16_384, 128, 1920, 2160, 1, 8, 16, 2),
        (54.08, 105, 20_480, 128, 2520, 2520, 1, 8, 35, 3),
        (102.6, 128, 25_600, 160, 3072, 3072, 1, 8, 64, 1),
    ]
    v3 = [
        # seconds with full recomputation and without sequence parallelism, seconds with it and selective recomputation
        (1.42, 1.10, 48, 6144, 64, 8, 4, 4, 1, 1),
        (18.13, 13.75, 96, 12_288, 96, 64, 64, 1, 8, 3),
        (49.05, 37.83, 105, 20_480, 128, 280, 280, 1, 35, 3),
        (94.42, 71.49, 128, 25_600, 160, 512, 512, 1, 64, 1),
        (39.15 * 54.2 / 42.1, 39.15, 105, 20_480, 128, 2240, 2240, 1, 35, 3),  # the first from the MFUs
    ]
    rows = []
    for seconds, layers, hidden, heads, gpus, batch, micro, tensor, pipe, chunks in v2:
        layout = {"tensor": tensor, "pipe": pipe, "chunks": chunks, "sequence_parallel": False, "remat": "full"}
        model = gpt(layers, hidden, heads)
        rows.append(row("V2", f"GPT {layers}x{hidden}", seconds, model, gpus, batch, micro, **old, **layout,
                        trainer=MEGATRON_2021))  # fmt: skip
    for full, selective, layers, hidden, heads, gpus, batch, micro, pipe, chunks in v3:
        for seconds, remat, parallel in ((full, "full", False), (selective, "selective", True)):
            layout = {"tensor": 8, "pipe": pipe, "chunks": chunks, "sequence_parallel": parallel, "remat": remat}
            name = f"GPT {layers}x{hidden} {remat}"
            rows.append(row("V3", name, seconds, gpt(layers, hidden, heads), gpus, batch, micro, **old, **layout,
                            trainer=MEGATRON_2022))  # fmt: skip
    return rows


def readme() -> list[Row]:
    rows = []
    for tflops, layers, hidden, heads, gpus, batch, tensor, pipe in [
        (408.8, 24, 2048, 16, 48, 192, 1, 1),
        (465.9, 30, 4096, 32, 96, 192, 2, 1),
        (489.1, 32, 6144, 48, 192, 192, 4, 1),
        (459.6, 48, 7168, 56, 384, 192, 8, 1),
        (419.7, 84, 8192, 64, 768, 384, 8, 2),
        (420.5, 92, 10_240, 80, 1536, 768, 8, 4),
        (432.8, 96, 12_288, 96, 2304, 1152, 8, 6),
        (474.4, 96, 16_384, 128, 3072, 1536, 8, 8),
        (459.9, 112, 18_432, 144, 6144, 3072, 8, 16),
        (0.47 * 989, 96, 12_288, 96, 96, 1152, 8, 6),
        (0.42 * 989, 96, 12_288, 96, 4608, 1152, 8, 6),
    ]:
        model = gpt(layers, hidden, heads, 131_072, 4096)
        seconds = from_tflops(tflops, model, gpus, batch)
        # Not published: micro batch and interleaving. Of the four samples of a replica 2 at a time, in pipelines 1, as
        # in the papers; one layer a chunk.
        chunks, micro = (layers // pipe, 1) if pipe > 1 else (1, 2)
        name = f"GPT {layers}x{hidden}"
        rows.append(row("README", name, seconds, model, gpus, batch, micro, tensor=tensor, pipe=pipe, chunks=chunks))
    return rows


LLAMA2_7B = llama(32, 4096, 32, 32, 11_008, 32_000, 4096)
LLAMA2_70B = llama(80, 8192, 64, 8, 28_672, 32_000, 4096)
LLAMA3_8B = llama(32, 4096, 32, 8, 14_336, 128_256, 8192)
LLAMA3_70B = llama(80, 8192, 64, 8, 28_672, 128_256, 8192)
LLAMA3_405B = llama(126, 16_384, 128, 8, 53_248, 128_256, 8192)
GPT_5B, GPT_175B = gpt(24, 4096, 32), gpt(96, 12_288, 96)
NEMOTRON_15B, NEMOTRON_340B = nemotron(32, 6144, 48, 8), nemotron(96, 18_432, 96, 8)
GROK = llama(64, 6144, 48, 8, 2 * 32_768, 131_072, 8192)
"""A mixture of 8 experts, 2 a token: here one MLP as wide as two, without the exchange of tokens."""


def nemo() -> list[Row]:
    rows = []

    def add(
        name: str, model: ModelConfig, batch_per_gpu: float, micro: int, layout: dict[str, int], *runs: Any
    ) -> None:
        for seconds, gpus, *fp8 in runs:
            batch = round(batch_per_gpu * gpus)
            rows.append(row("dgxc", name, seconds, model, gpus, batch, micro, trainer=NEMO, fp8=bool(fp8), **layout))

    add("Llama3.1-8B", LLAMA3_8B, 16, 1, {"context": 2}, (12.78, 8), (13.16, 128), (9.44, 8, "fp8"))
    layout = {"tensor": 4, "pipe": 4, "context": 2, "chunks": 5}
    add("Llama3.1-70B", LLAMA3_70B, 2, 1, layout, (14.61, 64), (14.84, 2048), (10.46, 64, "fp8"))
    layout = {"tensor": 8, "pipe": 9, "context": 2, "chunks": 7}
    add("Llama3.1-405B", LLAMA3_405B, 252 / 576, 1, layout, (17.5, 576), (11.0, 576, "fp8"))
    layout = {"tensor": 8, "pipe": 8, "context": 2, "chunks": 8}
    add("Llama3.1-405B", LLAMA3_405B, 1 / 2, 1, layout, (19.81, 512), (13.02, 512, "fp8"))
    layout = {"tensor": 4, "pipe": 8, "chunks": 12}
    add("GPT3-175B", GPT_175B, 2, 1, layout, (8.309, 128), (8.49, 2048), (5.626, 128, "fp8"))
    add("Nemotron4-15B", NEMOTRON_15B, 4, 4, {"tensor": 4}, (2.812, 16), (2.887, 2048))
    add("Nemotron4-15B", NEMOTRON_15B, 4, 2, {"tensor": 2}, (2.746, 16), (1.988, 16, "fp8"))
    layout = {"tensor": 8, "pipe": 8, "chunks": 12}
    runs = ((4.61, 128), (4.84, 2048), (4.606, 256), (3.107, 256, "fp8"))
    add("Nemotron4-340B", NEMOTRON_340B, 1 / 4, 1, layout, *runs)
    layout = {"tensor": 4, "pipe": 8, "context": 2, "chunks": 8}
    add("Grok-1 314B", GROK, 2, 1, layout, (16.93, 512), (21.01, 512), (13.454, 512, "fp8"))
    seconds = from_tflops(500, GPT_175B, 128, 256)
    rows.append(row("JaxPP", "GPT3-175B NeMo", seconds, GPT_175B, 128, 256, trainer=NEMO, tensor=4, pipe=8, chunks=12))
    return rows


def jax() -> list[Row]:
    rows = []

    def add(
        source: str, name: str, model: ModelConfig, batch_per_gpu: float, micro: int, *runs: Any, **more: Any
    ) -> None:
        for seconds, gpus, fsdp, *fp8 in runs:
            batch = round(batch_per_gpu * gpus)
            given: dict[str, Any] = {"trainer": MEGAJAX, "zero": 0, "fsdp": fsdp, "fp8": bool(fp8)} | more
            rows.append(row(source, name, seconds, model, gpus, batch, micro, **given))

    runs = ((6.999, 64, 64), (7.072, 128, 128), (7.153, 256, 256), (7.091, 512, 128), (7.084, 1024, 128),
            (7.066, 2048, 128), (4.324, 64, 64, "fp8"))  # fmt: skip
    add("dgxc", "Llama2-70B MaxText", LLAMA2_70B, 2, 2, *runs, remat=KEEP_QKV)
    runs = ((15.563, 128, 128), (15.444, 256, 256), (15.519, 512, 128), (15.603, 1024, 128), (15.898, 2048, 128),
            (9.074, 128, 128, "fp8"))  # fmt: skip
    add("dgxc", "Llama3-70B MaxText", LLAMA3_70B, 2, 2, *runs, remat=KEEP_QKV)
    runs = ((0.634, 16, 8), (0.651, 128, 8), (0.47, 16, 8, "fp8"))
    add("dgxc", "GPT-5B Paxml", GPT_5B, 4, 4, *runs, remat=KEEP_PRODUCTS)
    runs = ((7.47, 128, 128, "fp8"), (8.02, 2048, 128, "fp8"))
    add("dgxc", "GPT3-175B Paxml", GPT_175B, 2, 2, *runs, remat=KEEP_PROJECTIONS)
    add("Toolbox", "Llama2-7B MaxText", LLAMA2_7B, 2, 2, (0.721, 8, 8), trainer=UNROLLED)
    a3 = replace(H100, network_bandwidth=12.5e9)
    for tflops, gpus in ((492, 8), (422, 16), (407, 32), (409, 64), (375, 128)):
        run = (from_tflops(tflops, LLAMA2_7B, gpus, 4 * gpus), gpus, 8)  # fsdp in a node is MaxText's default
        add("A3", "Llama2-7B MaxText", LLAMA2_7B, 4, 4, run, gpu=a3)
    for name, scores, seconds in (("Pax", MEGAJAX.score_bytes, (256 / 1761.3, 2048 / 465.45, 1536 / 18.29)),
                                  ("Pax TE", TE_SCORES, (256 / 2339.8, 2048 / 598.83, 1536 / 19.62))):  # fmt: skip
        more = {"gpu": A100, "attention": "xla", "trainer": replace(MEGAJAX, score_bytes=scores)}
        unrolled = more | {"trainer": replace(UNROLLED, score_bytes=scores), "remat": "none"}
        add("Toolbox", f"GPT-126M {name}", gpt(12, 768, 12), 4, 4, (seconds[0], 64, 1), **unrolled)
        add("Toolbox", f"GPT-5B {name}", GPT_5B, 8, 8, (seconds[1], 256, 256), **more, remat=KEEP_PRODUCTS)
        add("Toolbox", f"GPT-175B {name}", GPT_175B, 6, 6, (seconds[2], 256, 256), **more, remat="full")
    add("AXLearn", "Llama2-7B", LLAMA2_7B, 4, 4, (1.4, 256, 8), remat=KEEP_ATTENTION)
    add("AXLearn", "Llama2-70B", LLAMA2_70B, 2, 2, (9.2, 512, 128), remat=KEEP_ATTENTION)
    # From memory: micro batches of 4 (1: +27 %); not known: what FSDP recomputes (not all: -17 %).
    layout: dict[str, int] = {"tensor": 8, "pipe": 8, "chunks": 6}
    runs = ((9.53, 64, 1), (from_tflops(442, GPT_175B, 1024, 2048), 1024, 1))
    add("JaxPP", "GPT3-175B JaxPP", GPT_175B, 2, 4, *runs, **layout)
    add("JaxPP", "GPT3-175B FSDP", GPT_175B, 2, 2, (10.63, 128, 128), remat="full")
    add("JaxPP", "GPT3-175B SPMD pipeline", GPT_175B, 2, 1, (13.96, 128, 1), remat="full", tensor=4, pipe=16)
    return rows


def published() -> list[Row]:
    """Return all published step times of A100s and H100s."""
    return [*papers(), *readme(), *nemo(), *jax()]
