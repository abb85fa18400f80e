"""Model FLOPs and peaks against published numbers."""

import jax
import pytest

from megajax.config.model import ModelConfig
from megajax.planning.flops import count_flops, flops_per_token
from megajax.planning.hardware import device_peak, find_gpu, measured_matmul_peak, table_peak


def gpt(heads, hidden, layers):
    return ModelConfig(num_layers=layers, hidden_size=hidden, num_heads=heads, vocab_size=51_200, max_positions=2048)


def test_classic_formula():
    """Case T02. 72 B L S D^2 (1 + S/6D + V/12DL): with the factor 72 goes V/12, not V/16."""
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
    assert flops_per_token(llama, 8192, "full") == dense + 12 * 32 * 4096 * 8192 == pytest.approx(57.9e9, rel=1e-3)
    assert flops_per_token(llama, 8192, "causal") == dense + 6 * 32 * 4096 * 8192 == pytest.approx(51.5e9, rel=2e-3)


@pytest.mark.parametrize("kind", ["NVIDIA H200", "NVIDIA H100 80GB HBM3"])
def test_peak_is_dense(kind):
    """Case T03. 420 TFLOP/s of 989.5 is 42.4 %, not the 21.2 % of the sparse peak; the label says which peak it is."""
    peak = table_peak(kind, "bf16")
    assert round(100 * 420e12 / peak.flops, 1) == 42.4
    assert "989.5 TFLOP/s, dense bf16" in peak.label


def test_unknown_chip_has_no_peak():
    """Case T03."""
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
