"""Eight simulated CPU devices for every test and the processes that it starts, and a compiler in a hurry."""

import os

# Before anything imports JAX. Tests compile far more than they compute.
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8".strip()

from megajax.parallel.mesh import compile_fast

compile_fast()

from hypothesis import settings  # noqa: E402

# An example's first call compiles, and tests share their cores: how long one takes says nothing.
settings.register_profile("patient", deadline=None)
settings.load_profile("patient")
