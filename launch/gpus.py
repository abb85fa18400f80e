"""The NVIDIA GPUs of this machine, asked of `nvidia-smi`: importing JAX here would take their memory."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Mapping


def query(field: str) -> list[str]:
    """Return one property of every GPU, such as "name" or "driver_version". The list is empty without a driver."""
    if shutil.which("nvidia-smi") is None:
        return []
    command = ["nvidia-smi", f"--query-gpu={field}", "--format=csv,noheader"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    return [line.strip() for line in done.stdout.splitlines()] if done.returncode == 0 else []


def visible_gpus(environment: Mapping[str, str] = os.environ) -> list[str]:
    """Return the GPUs that CUDA_VISIBLE_DEVICES may name: those that the user has chosen, or all of them."""
    chosen = environment.get("CUDA_VISIBLE_DEVICES")
    return query("index") if chosen is None else [gpu.strip() for gpu in chosen.split(",") if gpu.strip()]
