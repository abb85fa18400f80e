"""Configuration of the mesh: how many devices each axis takes."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Annotated, Literal

from pydantic import NonNegativeInt, PositiveInt

from megajax.config.base import Elsewhere, InputError, component
from megajax.config.model import ModelConfig
from megajax.config.needs import require_multiple

AXES = ("pipe", "data", "fsdp", "expert", "context", "tensor")
"""Mesh axes, slowest to fastest: the first six fields of ParallelConfig."""
REPLICAS = ("data", "fsdp", "expert")
"""Axes along which the samples of a batch are divided: a sample lies at one place of each."""


def fit_vocabulary(model: ModelConfig, parallel: ParallelConfig) -> ModelConfig:
    """Pad the vocabulary so that every stage and tensor shard holds the same number of rows.

    Padding rows take part in nothing: loss, gradients and checkpoints do not depend on their number.
    """
    return replace(model, vocab_multiple=math.lcm(model.vocab_multiple, parallel.pipe * parallel.tensor))


@component
class ParallelConfig:
    """Number of devices along each mesh axis, slowest axis first: pipe, data, fsdp, expert, context, tensor."""

    pipe: Annotated[PositiveInt, Elsewhere("pipeline_model_parallel_size pp")] = 1
    """Number of pipeline stages."""
    chunks: Annotated[
        PositiveInt,
        Elsewhere("num_virtual_stages_per_pipeline_rank num_layers_per_virtual_pipeline_stage=LAYERS/(PIPE*N)"),
    ] = 1
    """Number of chunks of layers in a pipeline stage (Megatron: virtual stages); more than 1 interleaves, for a smaller
    bubble."""
    data: Annotated[PositiveInt | Literal["auto"], Elsewhere("data_parallel_size dp")] = "auto"
    """Number of replicas of the model; auto = the devices that the other axes leave."""
    fsdp: Annotated[
        PositiveInt, Elsewhere("data_parallel_sharding_strategy use_megatron_fsdp=DEVICES use_torch_fsdp2=DEVICES")
    ] = 1
    """Number of parts into which the batch and every weight are cut; weights are gathered layer by layer (ZeRO-3)."""
    expert: Annotated[PositiveInt, Elsewhere("expert_model_parallel_size ep")] = 1
    """Number of parts into which the experts of a mixture are divided."""
    context: Annotated[PositiveInt, Elsewhere("context_parallel_size cp")] = 1
    """Number of parts into which the sequence is cut in attention."""
    tensor: Annotated[PositiveInt, Elsewhere("tensor_model_parallel_size tp")] = 1
    """Number of parts into which heads, MLP and vocabulary are cut (Megatron's tensor parallelism)."""
    zero: Annotated[Literal[0, 1], Elsewhere("use_distributed_optimizer=1")] = 0
    """1 = split master weights and optimizer state over data as well (ZeRO-1): gradients are reduce-scattered, and the
    weights gathered once a step in the compute dtype."""
    whole_heads: bool = False
    """Let every tensor shard compute all of the attention, for models whose heads do not divide over tensor."""
    sequence_parallel: bool = True
    """Cut the residual stream, norms and dropout along the sequence over tensor as well."""
    simulate_devices: NonNegativeInt = 0
    """Number of simulated CPU devices to run on instead of the real ones; 0 = run on the real ones."""

    @property
    def sizes(self) -> dict[str, int]:
        """Return the size of every mesh axis, slowest first, once `resolve_mesh` has worked out what `auto` is."""
        assert self.data != "auto"
        return {axis: getattr(self, axis) for axis in AXES}


def resolve_mesh(parallel: ParallelConfig, num_devices: int) -> dict[str, int]:
    """Return the size of every mesh axis, slowest first, in which `auto` is worked out.

    Raises:
        InputError: the mesh does not take exactly `num_devices` devices; shows the arithmetic.
    """
    if parallel.data == "auto":
        others = {axis: getattr(parallel, axis) for axis in AXES if axis != "data"}
        replica = math.prod(others.values())
        require_multiple("the number of devices", num_devices, _product(others), replica, _MESH_REMEDY)
        return replace(parallel, data=num_devices // replica).sizes
    sizes = parallel.sizes
    if math.prod(sizes.values()) != num_devices:
        product = f"{_product(sizes)} {math.prod(sizes.values())}"
        raise InputError(f"the mesh takes {product} devices, but there are {num_devices}: {_MESH_REMEDY}")
    return sizes


_MESH_REMEDY = "change the parallel.* sizes, or the devices (parallel.simulate_devices=N needs no GPU)"


def _product(sizes: dict[str, int]) -> str:
    return " x ".join(f"{axis} {size}" for axis, size in sizes.items()) + " ="
