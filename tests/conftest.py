"""Eight simulated CPU devices for every test, and a compiler in a hurry: asked for before anything imports JAX."""

import os
from importlib.metadata import version

# Tests compile far more than they compute: unoptimised code takes a fifth of the time to compile. Same maths.
FLAGS = ["--xla_force_host_platform_device_count=8", "--xla_backend_optimization_level=0"]
if version("jax") < "0.12":  # later versions refuse the flag
    FLAGS.append("--xla_cpu_use_fusion_emitters=false")
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = " ".join([os.environ.get("XLA_FLAGS", ""), *FLAGS]).strip()
