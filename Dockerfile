# MegaJAX for NVIDIA GPUs:
#   docker build -t megajax . && docker run --gpus all --shm-size=16g megajax python -m launch.doctor
#
# A plain Python image: JAX's wheels bring CUDA, cuDNN and NCCL of the versions that they were built with, and the host
# has to have nothing but the driver (580 or newer for CUDA 13) and the NVIDIA container toolkit.
FROM python:3.12-slim

# Without libibverbs and its drivers NCCL finds no InfiniBand or RoCE, and falls back to slow sockets.
RUN apt-get update \
    && apt-get install --yes --no-install-recommends libibverbs1 ibverbs-providers \
    && rm -rf /var/lib/apt/lists/*

# What the container toolkit reads: all GPUs, with CUDA and nvidia-smi.
ENV NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility PYTHONUNBUFFERED=1

# Not root: checkpoints on a shared file system belong to somebody.
ARG UID=1000
RUN useradd --create-home --uid "$UID" megajax
WORKDIR /megajax

# The dependencies come first: they change less often than the code, which an editable installation finds in place.
COPY pyproject.toml README.md LICENSE ./
RUN mkdir megajax && touch megajax/__init__.py && pip install --no-cache-dir --editable ".[cuda13]"
COPY megajax megajax
COPY configs configs
COPY launch launch

USER megajax
