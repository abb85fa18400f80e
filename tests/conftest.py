"""Every test, and the processes that it starts, have eight simulated CPU devices and a fast compilation."""

import json
import os
from pathlib import Path

# Before anything imports JAX. Tests compile far more than they compute.
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8".strip()

from megajax.parallel.mesh import compile_fast

compile_fast()

import numpy as np  # noqa: E402
import pytest  # noqa: E402
from hypothesis import settings  # noqa: E402

# An example's first call compiles, and tests share their cores: how long one takes says nothing.
settings.register_profile("patient", deadline=None)
settings.load_profile("patient")


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Forty documents of counting numbers."""
    path = tmp_path_factory.mktemp("corpus") / "numbers.jsonl"
    rng = np.random.default_rng(0)
    starts = rng.integers(0, 50, 40)
    texts = [" ".join(str((start + i) % 50) for i in range(90)) for start in starts]
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts), encoding="utf-8")
    return path
