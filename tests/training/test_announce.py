"""A run announces itself before it starts."""

import jax
import pytest

from megajax.config import load_config
from megajax.config.parallel import AXES
from megajax.costs.flops import count_flops
from megajax.parallel.mesh import build_mesh
from megajax.training.setup import throughput_of


@pytest.mark.parametrize(
    ("preset", "attention"),
    [
        ("gpt_tiny", "causal attention"),
        ("bert_tiny", "full attention"),
        ("t5_tiny", "full, in the decoder causal attention"),
    ],
)
def test_the_mfu_line_says_which_scores_count(preset: str, attention: str):
    """Who looks both ways is charged for all scores: half of them would be another number."""
    config = load_config(f"verify/{preset}.yaml", ["log.peak_tflops=1", "model.vocab_multiple=1"]).config
    throughput = throughput_of(config, build_mesh(dict.fromkeys(AXES, 1), jax.devices()[:1]))
    assert f"({attention}, no recomputation)" in throughput.describe()
    if preset == "bert_tiny":
        every = count_flops(config.model, 1, config.data.seq_length, "full").model
        assert throughput.flops_per_sample == every
