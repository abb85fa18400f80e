"""More step times that others measured, from which no constant of the A100 and the H100 was set.

GB200's own shares, from its best measured matrix product, were added after its rows had been seen.

MT-NLG    2201.11990: DeepSpeed on Megatron-LM, full recomputation, 1F1B
Table 2   2104.04473 table 2, from TFLOP/s with full recomputation
BLOOM     bigscience's chronicles-prequel.md: Megatron-DeepSpeed, fp16, ZeRO-1, 384 A100s
CI        Megatron-LM's golden values, not tuned for speed
Launcher  NeMo-Framework-Launcher, fp8, from tokens/s;  Bridge: Megatron-Bridge's card of Qwen3-8B
MPT       mosaicml/llm-foundry, PyTorch FSDP, from tokens/s
GB200     NVIDIA/dgxc-benchmarking, Nemotron4-340B;  H200: GoogleCloud/gpu-recipes, MaxText Llama3.1-70B
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from megajax.config import ModelConfig
from megajax.costs.flops import count_flops
from megajax.costs.hardware import gpu_named
from megajax.planning.cut import MEGAJAX
from tests.planning.published_steps import (
    A100,
    GPT_5B,
    GPT_175B,
    H100,
    KEEP_QKV,
    LLAMA2_7B,
    LLAMA2_70B,
    LLAMA3_8B,
    LLAMA3_70B,
    MEGATRON_2021,
    NEMO,
    NEMOTRON_15B,
    NEMOTRON_340B,
    Row,
    gpt,
    llama,
    nemotron,
    row,
)

FSDP = replace(MEGAJAX, name="FSDP", scans_layers=False)
"""PyTorch's: sharded weights as in MegaJAX, layers one after the other."""


def a100() -> list[Row]:
    rows = []
    old: dict[str, Any] = {"gpu": A100, "trainer": MEGATRON_2021, "remat": "full", "attention": "xla", "zero": 0}
    old |= {"sequence_parallel": False}
    mt_nlg = gpt(105, 20_480, 128)
    for seconds, replicas in ((60.1, 8), (50.2, 10), (44.4, 12)):
        rows.append(row("MT-NLG", "530B", seconds, mt_nlg, 280 * replicas, 1920, **old, tensor=8, pipe=35))
    for tflops, gpus, model, batch, pipe in [
        (153, 384, GPT_175B, 1536, 12),
        (149, 768, GPT_175B, 1536, 12),
        (141, 1536, GPT_175B, 1536, 12),
        (171, 560, mt_nlg, 2240, 35),
        (167, 1120, mt_nlg, 2240, 35),
        (159, 2240, mt_nlg, 2240, 35),
    ]:
        flops = count_flops(model, batch, 2048, "full").hardware("full")
        seconds = flops / (tflops * 1e12 * gpus)
        rows.append(
            row("Table 2", f"GPT {model.num_layers} layers", seconds, model, gpus, batch, **old, tensor=8, pipe=pipe)
        )
    for seconds, layers, hidden, heads, tensor, pipe, micro, batch in [
        (114.1, 72, 14_336, 64, 8, 6, 4, 2048),
        (117.1, 72, 14_336, 64, 8, 12, 4, 2048),
        (128.8, 72, 14_336, 64, 8, 12, 2, 2048),
        (113.2, 72, 14_336, 64, 8, 8, 4, 2016),
        (125.5, 72, 14_336, 64, 8, 4, 2, 2016),
        (136.1, 72, 14_336, 64, 8, 2, 2, 2016),
        (110.5, 72, 14_336, 64, 4, 12, 2, 2048),
        (111.9, 72, 14_336, 64, 4, 12, 4, 2048),
        (111.7, 72, 14_336, 64, 4, 6, 2, 2048),
        (112.5, 72, 14_336, 64, 2, 12, 2, 2048),
        (119.5, 72, 14_336, 64, 2, 24, 1, 2048),
        (130.6, 72, 14_336, 64, 4, 24, 1, 2048),
        (35.8, 78, 13_824, 96, 4, 12, 2, 512),
        (59.7, 78, 13_824, 96, 4, 12, 2, 1024),
        (83.1, 78, 13_824, 96, 4, 12, 2, 1536),
        (107.1, 78, 13_824, 96, 4, 12, 2, 2048),
        (112.7, 106, 12_288, 96, 4, 12, 2, 2048),
        (142.2, 96, 12_288, 96, 1, 48, 1, 2048),
    ]:
        model, layout = gpt(layers, hidden, heads, 250_880), {"tensor": tensor, "pipe": pipe} | old | {"zero": 1}
        rows.append(row("BLOOM", f"{layers}x{hidden} t{tensor} p{pipe}", seconds, model, 384, batch, micro, **layout))
    return rows


def hopper() -> list[Row]:
    small = gpt(32, 4096, 32, 131_584, 8192, num_kv_heads=8, ffn_hidden_size=16_384, tied_head=False)
    rows = [
        row("CI", "7B t4", 1.115, small, 8, 8, 2, tensor=4, sequence_parallel=False),
        row("CI", "7B t4", 2.587, small, 8, 8, 2, gpu=A100, tensor=4, sequence_parallel=False),
        row("CI", "7B p4 v8", 1.150, small, 8, 8, pipe=4, chunks=8),
        row("CI", "7B p4 v8", 2.942, small, 8, 8, gpu=A100, pipe=4, chunks=8),
        row("CI", "15B t8", 1.435, NEMOTRON_15B, 256, 384, 4, tensor=8),
        row("CI", "15B t8", 3.390, NEMOTRON_15B, 256, 384, 4, gpu=A100, tensor=8),
        row("Bridge", "Qwen3-8B", 25.07, llama(36, 4096, 32, 8, 12_288, 151_936, 4096), 16, 1024),
    ]

    def launcher(name: str, rate: float, model: ModelConfig, gpus: int, batch: int, micro: int, **more: int) -> None:
        seconds = batch * model.max_positions / (rate * gpus)
        rows.append(row("Launcher", name, seconds, model, gpus, batch, micro, H100, NEMO, True, **more))

    launcher("GPT3-5B", 23_117, GPT_5B, 64, 2048, 4)
    launcher("GPT3-20B", 5611, gpt(44, 6144, 48), 64, 256, 2, tensor=2)
    launcher("GPT3-175B", 741, GPT_175B, 512, 2048, 2, tensor=4, pipe=8, chunks=6)
    launcher("Llama2-7B", 16_154, LLAMA2_7B, 8, 128, 1)
    launcher("Llama2-13B", 8344, llama(40, 5120, 40, 40, 13_824, 32_000, 4096), 16, 128, 1, pipe=4, chunks=10)
    launcher("Llama2-70B", 1659, LLAMA2_70B, 64, 128, 1, tensor=4, pipe=4, chunks=20)
    launcher("Nemotron-8B", 11_753, nemotron(32, 4096, 32, 32), 64, 256, 4, tensor=2)
    launcher("Llama3-8B", 11_879, LLAMA3_8B, 8, 128, 1, context=2)
    launcher("Llama3-70B", 1444, LLAMA3_70B, 64, 128, 1, tensor=4, pipe=4, context=2, chunks=5)
    return rows


def mpt() -> list[Row]:
    shapes = {
        "70b": (80, 8192, 64),
        "30b": (48, 7168, 56),
        "13b": (40, 5120, 40),
        "7b": (32, 4096, 32),
        "3b": (32, 2560, 20),
        "1b": (24, 2048, 16),
        "760m": (24, 1536, 12),
        "350m": (24, 1024, 16),
        "125m": (12, 768, 12),
    }
    rows = []
    for gpu, name, seconds, gpus, batch, micro in [
        (H100, "70b", 15.49, 128, 1024, 8),
        (H100, "70b", 16.27, 512, 4096, 8),
        (H100, "30b", 7.45, 128, 1024, 8),
        (H100, "30b", 64.45, 8, 504, 3),
        (H100, "13b", 6.45, 128, 2048, 16),
        (H100, "13b", 0.85, 8, 16, 2),
        (H100, "7b", 1.15, 8, 48, 6),
        (H100, "7b", 1.27, 512, 3072, 6),
        (H100, "3b", 2.54, 16, 480, 10),
        (H100, "1b", 0.63, 8, 112, 14),
        (H100, "760m", 1.56, 8, 384, 24),
        (A100, "70b", 159.84, 64, 2048, 8),
        (A100, "30b", 140.86, 8, 504, 3),
        (A100, "13b", 5.43, 8, 48, 2),
        (A100, "7b", 5.30, 8, 96, 6),
        (A100, "3b", 3.79, 8, 160, 10),
        (A100, "1b", 5.59, 8, 448, 14),
        (A100, "350m", 2.23, 8, 512, 32),
        (A100, "125m", 1.15, 8, 640, 40),
    ]:
        recomputes = name in ("70b", "30b") or (name == "13b" and micro == 16)
        more: dict[str, Any] = {"trainer": FSDP, "zero": 0, "fsdp": gpus, "gpu": gpu}
        more["remat"] = "full" if recomputes else "selective"
        rows.append(row("MPT", name, seconds, gpt(*shapes[name], 50_432), gpus, batch, micro, **more))
    return rows


def other_gpus() -> list[Row]:
    rows, gb200 = [], gpu_named("GB200")
    for seconds, gpus, batch, fp8 in [
        (2.189, 128, 32, False),
        (2.19, 256, 64, False),
        (2.229, 512, 128, False),
        (1.483, 128, 32, True),
        (1.517, 256, 64, True),
        (1.549, 512, 128, True),
        (32.66, 128, 512, False),
        (16.58, 256, 512, False),
        (8.468, 512, 512, False),
        (21.83, 128, 512, True),
        (11.21, 256, 512, True),
        (5.668, 512, 512, True),
    ]:
        layout = {"tensor": 8, "pipe": 4, "chunks": 12}
        rows.append(row("GB200", "Nemotron4-340B", seconds, NEMOTRON_340B, gpus, batch, 1, gb200, NEMO, fp8, **layout))
    recipe: dict[str, Any] = {"gpu": gpu_named("H200"), "trainer": MEGAJAX, "remat": KEEP_QKV, "zero": 0, "fsdp": 128}
    rows.append(row("H200", "Llama3.1-70B MaxText", 15.516, replace(LLAMA3_70B), 256, 512, 2, **recipe))
    return rows


def held_out() -> list[Row]:
    return [*a100(), *hopper(), *mpt(), *other_gpus()]
