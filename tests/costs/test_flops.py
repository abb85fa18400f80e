"""Model FLOPs and peaks, compared with published numbers."""

from dataclasses import replace

import jax
import pytest

from megajax.config import load_config
from megajax.config.model import ModelConfig
from megajax.costs.flops import budget, count_flops
from megajax.costs.hardware import find_gpu, table_peak
from megajax.costs.weights import parameter_count
from megajax.observe.throughput import measured_matmul_peak
from megajax.training.setup import device_peak


def gpt(heads, hidden, layers):
    return ModelConfig(num_layers=layers, hidden_size=hidden, num_heads=heads, vocab_size=51_200, max_positions=2048)


def test_classic_formula():
    """72 B L S D^2 (1 + S/6D + V/12DL): with the factor 72 goes V/12, not V/16."""
    flops = count_flops(gpt(16, 1024, 24), batch=1, sequence=1024, attention="full")
    assert flops.model == 2_486_786_064_384
    assert flops.model == round(72 * 24 * 1024**3 * (1 + 1024 / (6 * 1024) + 51_200 / (12 * 1024 * 24)))


def test_full_recomputation_is_the_96_formula():
    flops = count_flops(gpt(16, 1024, 24), batch=1, sequence=1024, attention="full")
    assert flops.hardware("none") == flops.model
    assert flops.hardware("full") == round(96 * 24 * 1024**3 * (1 + 1024 / (6 * 1024) + 51_200 / (16 * 1024 * 24)))


@pytest.mark.parametrize(
    ("heads", "hidden", "layers", "gpus", "batch", "seconds", "mfu", "hfu"),
    [
        pytest.param(64, 6144, 48, 8, 4, 1.10, 41.7, 43.8, id="22B"),
        pytest.param(96, 12288, 96, 64, 64, 13.75, 51.4, 52.8, id="175B"),
        pytest.param(128, 20480, 105, 280, 280, 37.83, 56.0, 57.0, id="530B"),
        pytest.param(160, 25600, 128, 512, 512, 71.49, 56.3, 57.0, id="1T"),
    ],
)
def test_megatron_table_5(heads, hidden, layers, gpus, batch, seconds, mfu, hfu):
    """2205.05198, table 5, from its step times (its 22B row says 41.5 and 43.7: 1.10 s is rounded)."""
    flops = count_flops(gpt(heads, hidden, layers), batch, 2048, "full")
    available = seconds * gpus * 312e12
    assert round(100 * flops.model / available, 1) == mfu
    assert round(100 * flops.hardware("selective") / available, 1) == hfu


@pytest.mark.parametrize(
    ("shape", "gpus", "batch", "tflops", "billions", "percent", "petaflops", "derived"),
    [
        ((24, 2304, 24), 32, 512, 137, 1.7, 44, 4.4, (3.53, 33.5)),
        ((32, 3072, 30), 64, 512, 138, 3.6, 44, 8.8, (3.70, 33.5)),
        ((32, 4096, 36), 128, 512, 142, 7.5, 46, 18.2, (3.70, 34.4)),
        ((48, 6144, 40), 256, 1024, 135, 18.4, 43, 34.6, (9.40, 32.6)),
        ((64, 8192, 48), 512, 1536, 138, 39.1, 44, 70.8, (14.45, 33.3)),
        ((80, 10240, 60), 1024, 1792, 140, 76.1, 45, 143.8, (16.06, 33.7)),
        ((96, 12288, 80), 1536, 2304, 148, 145.6, 47, 227.1, (24.82, 35.6)),
        ((128, 16384, 96), 1920, 2160, 155, 310.1, 50, 297.4, (37.61, 37.3)),
        ((128, 20480, 105), 2520, 2520, 163, 529.6, 52, 410.2, (54.08, 39.2)),
        ((160, 25600, 128), 3072, 3072, 163, 1008.0, 52, 502.0, (102.63, 39.2)),
    ],
)
def test_megatron_v2_table_1(shape, gpus, batch, tflops, billions, percent, petaflops, derived):
    """2104.04473. Its TFLOP/s are hardware's, with full recomputation; step time and MFU are derived from them."""
    model = gpt(*shape)
    flops = count_flops(model, batch, 2048, "full")
    seconds = flops.hardware("full") / (gpus * tflops * 1e12)
    assert parameter_count(model) / 1e9 == pytest.approx(billions, abs=0.06)
    assert 100 * tflops / 312 == pytest.approx(percent, abs=0.6)
    assert gpus * tflops / 1000 == pytest.approx(petaflops, rel=0.004)  # three digits of TFLOP/s
    assert (round(seconds, 2), round(100 * flops.model / (seconds * gpus * 312e12), 1)) == derived


@pytest.mark.parametrize(
    ("billions", "heads", "hidden", "layers", "gpus", "batch", "tflops", "mfu", "petaflops"),
    [
        (1.7, 16, 2048, 24, 48, 192, 408.8, 41, 19.6),
        (7.1, 32, 4096, 30, 96, 192, 465.9, 47, 44.7),
        (16, 48, 6144, 32, 192, 192, 489.1, 49, 93.9),
        (32, 56, 7168, 48, 384, 192, 459.6, 46, 176.5),
        (70, 64, 8192, 84, 768, 384, 419.7, 42, 322.3),
        (119, 80, 10240, 92, 1536, 768, 420.5, 43, 645.9),
        (177, 96, 12288, 96, 2304, 1152, 432.8, 44, 997.2),
        (314, 128, 16384, 96, 3072, 1536, 474.4, 48, 1457.4),
        (462, 144, 18432, 112, 6144, 3072, 459.9, 47, 2825.6),
    ],
)
def test_megatron_readme_h100_table(billions, heads, hidden, layers, gpus, batch, tflops, mfu, petaflops):
    """Megatron-LM's README, core 0.8: bf16 on H100s, S = 4096, V = 131,072, full attention, peak 989 TFLOP/s.

    It prints no step times: `seconds` is what its counter, 12 B S L D^2 (1 + K/N + S/D + F/D + V/2LD), makes of them.
    """
    model = ModelConfig(
        num_layers=layers,
        hidden_size=hidden,
        num_heads=heads,
        vocab_size=131_072,
        max_positions=4096,
        positions="rope",
        tied_head=False,
    )
    counted = 12 * batch * 4096 * layers * hidden**2 * (1 + 1 + 4096 / hidden + 4 + 131_072 / (2 * layers * hidden))
    seconds = counted / (gpus * tflops * 1e12)
    flops = count_flops(model, batch, 4096, "full").model
    assert parameter_count(model) / 1e9 == pytest.approx(billions, rel=0.03)
    assert round(flops / (seconds * gpus * 1e12), 1) == tflops
    assert round(100 * flops / (seconds * gpus * 989e12)) == mfu
    assert round(flops / seconds / 1e15, 1) == petaflops


def test_days_for_a_token_budget():
    """2104.04473, section 5.1: 8 T P / n X, which leaves out S and V, gives 34 and 84 days."""
    for (heads, hidden, layers), tokens, gpus, tflops, days in (
        ((96, 12288, 96), 300e9, 1024, 140, 34),
        ((160, 25600, 128), 450e9, 3072, 163, 84),
    ):
        per_token = count_flops(gpt(heads, hidden, layers), 1, 2048, "full").hardware("full") / 2048
        assert budget(tokens, gpus * tflops * 1e12 / per_token, gpus).days == pytest.approx(days, rel=0.025)


def test_gpu_hours_of_llama_65b():
    """2302.13971: 380 tokens/s on each of 2,048 A100s, 1.4T tokens; 1,022,362 GPU-hours, about 21 days."""
    time = budget(1.4e12, 380 * 2048, 2048)
    assert time.gpu_hours == pytest.approx(1_022_362, rel=0.002)
    assert round(time.days) == 21


def test_causal_attention_halves_the_core_only():
    full, causal = (count_flops(gpt(16, 1024, 24), 1, 1024, attention) for attention in ("full", "causal"))
    assert causal.core * 2 == full.core
    assert (causal.projections, causal.mlp, causal.logits) == (full.projections, full.mlp, full.logits)


def test_llama3_8b_per_token():
    """Grouped queries and swiglu: 57.9e9 FLOPs per token with full, 51.5e9 with causal attention at S = 8192."""
    llama = ModelConfig(
        num_layers=32,
        hidden_size=4096,
        num_heads=32,
        num_kv_heads=8,
        ffn_hidden_size=14_336,
        activation="swiglu",
        vocab_size=128_256,
        max_positions=8192,
    )
    blocks = 32 * (4096 * (4096 + 2 * 1024) + 4096 * 4096 + 3 * 4096 * 14_336)
    dense = 6 * (blocks + 4096 * 128_256)
    full, causal = (count_flops(llama, 1, 8192, attention).model / 8192 for attention in ("full", "causal"))
    assert full == dense + 12 * 32 * 4096 * 8192 == pytest.approx(57.9e9, rel=1e-3)
    assert causal == dense + 6 * 32 * 4096 * 8192 == pytest.approx(51.5e9, rel=2e-3)


@pytest.mark.parametrize("kind", ["NVIDIA H200", "NVIDIA H100 80GB HBM3"])
def test_peak_is_dense(kind):
    """420 TFLOP/s of 989.5 is 42.4 %, not the 21.2 % of the sparse peak; the label says which peak it is."""
    peak = table_peak(kind, "bf16")
    assert round(100 * 420e12 / peak.flops, 1) == 42.4
    assert "989.5 TFLOP/s, dense bf16" in peak.label


def test_unknown_chip_has_no_peak():
    peak = table_peak("NVIDIA GeForce GT 1030", "bf16")
    assert peak.flops is None
    assert "n/a" in peak.label and "GT 1030" in peak.label and "log.peak_tflops" in peak.label


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("NVIDIA A100-SXM4-80GB", "A100-80GB"),
        ("NVIDIA A100-PCIE-40GB", "A100-40GB"),
        ("NVIDIA H100 PCIe", "H100-PCIe"),
        ("NVIDIA H100 NVL", "H100-NVL"),
        ("NVIDIA H100 80GB HBM3", "H100"),
        ("NVIDIA H200", "H200"),
        ("NVIDIA H200 NVL", "H200-NVL"),
        ("NVIDIA B200", "B200"),
        ("NVIDIA GB200", "GB200"),
        ("NVIDIA B300 SXM6 AC", "B300"),
    ],
)
def test_gpu_by_device_kind(kind, name):
    assert find_gpu(kind).name == name


@pytest.mark.parametrize("kind", ["NVIDIA A10", "NVIDIA GH200 480GB", "NVIDIA H20", "NVIDIA GB300"])
def test_relatives_without_an_entry_are_unknown(kind):
    assert find_gpu(kind) is None


def test_fp32_matrix_products_run_in_tf32():
    assert table_peak("NVIDIA A100-SXM4-80GB", "fp32").flops == 156e12


def test_peak_of_a_cpu_is_measured_and_shared_by_simulated_devices():
    measured = measured_matmul_peak("fp32", size=256, seconds=0.05)
    assert 1e8 < measured < 1e14
    peak = device_peak(jax.devices()[0], "fp32")
    assert 0 < peak.flops < 1e14 and "measured fp32" in peak.label


def test_peak_given_by_the_user_wins():
    assert device_peak(jax.devices()[0], "bf16", override_tflops=100).flops == 1e14
    assert device_peak(jax.devices()[0], "bf16", override_tflops=0).flops is None


def test_local_and_global_layers_are_charged_each():
    """Gemma 2 2B at 8192: local layers see 4096 - 4096^2 / 16384 = 3072 keys on average, global ones 4096; 13 of each,
    8 heads of 256, 4 FLOPs a score and unit. Five layers of a pattern of two: three local ones.
    """
    shape = load_config("models/gemma2_2b.yaml").config.model
    core = count_flops(shape, 1, 8192, "causal").core
    assert core == 13 * (3072 + 4096) * 8192 * 4 * 8 * 256
    core = count_flops(replace(shape, num_layers=5), 1, 8192, "causal").core
    assert core == pytest.approx((3 * 3072 + 2 * 4096) * 8192 * 4 * 8 * 256, abs=1)


def test_dense_layers_of_a_mixture_are_charged_their_own_mlp():
    """Two of five layers, F 100, before three whose tokens use two experts of F 30 and a shared one of F 8."""
    shape = replace(
        load_config("models/mixtral_8x7b.yaml").config.model, num_layers=5, dense_layers=2, hidden_size=64, num_heads=4,
        num_kv_heads=2, ffn_hidden_size=100, expert_ffn_size=30, shared_ffn_size=8,
    )  # fmt: skip
    assert count_flops(shape, 1, 16, "causal").mlp == 2 * 16 * 64 * 3 * (2 * 100 + 3 * (2 * 30 + 8))


def test_window_bounds_the_keys_that_are_seen():
    """Causal, window 3 of 8 tokens: 1 + 2 + 6 x 3 keys, less half of the window's own triangle, as without a window."""
    shape = replace(gpt(2, 16, 1), window=3)
    plain = count_flops(replace(shape, window=8), 1, 8, "causal").core
    assert plain == 4 * 16 * 8 * 8 / 2
    assert count_flops(shape, 1, 8, "causal").core == 4 * 16 * (8 * 3 - 9 / 2)
    assert count_flops(shape, 1, 8, "full").core == 2 * plain


def test_a_token_of_a_mixture_pays_for_its_experts_alone():
    """2407.10671's kind: of 60 experts of 8 units a token uses 4, and a shared one of 32."""
    mixture = {"experts": 60, "experts_per_token": 4, "expert_ffn_size": 8, "bias": False}
    shape = replace(gpt(2, 16, 3), activation="swiglu", **mixture)
    assert count_flops(shape, 1, 10, "full").mlp == 3 * 10 * 6 * 16 * 4 * 8
    assert count_flops(replace(shape, shared_ffn_size=32), 1, 10, "full").mlp == 3 * 10 * 6 * 16 * (4 * 8 + 32)


def test_an_encoder_sees_all_keys_and_has_a_transform():
    bert = replace(gpt(2, 16, 1), family="bert")
    full, causal = (count_flops(bert, 1, 8, attention) for attention in ("full", "causal"))
    assert full == causal
    assert full.logits == 2 * 8 * 16 * bert.padded_vocab_size + 2 * 8 * 16 * 16


def test_t5_is_an_encoder_a_decoder_and_the_attention_between_them():
    """16 tokens in, 4 out, D = 16, one layer each: every count written out."""
    t5 = replace(gpt(2, 16, 1), family="t5", positions="relative", bias=False, encoder_layers=1, ffn_hidden_size=24)
    flops = count_flops(t5, 1, 16, "causal", decoder_sequence=4)
    assert flops.mlp == 2 * (16 + 4) * 16 * 24 * 2
    assert flops.projections == 2 * (16 + 4) * 4 * 16 * 16 + 2 * 16 * 16 * (4 + 4 + 16 + 16)
    assert flops.core == 4 * 16 * 16 * 16 + 4 * 16 * 4 * 4 / 2 + 4 * 16 * 4 * 16
    assert flops.logits == 2 * 4 * 16 * t5.padded_vocab_size
