"""Batches on the mesh: from rows in host memory to global arrays, [M, B, S] each.

Sample j of a global batch is row j % B of microbatch j // B. So a step trains on the same samples under every layout,
and only their grouping into microbatches changes. A process reads only the rows that its devices hold. The tokens of a
sample are in the order of `parallel.context`.

Shapes: G global batch, M microbatches, B = micro batch x data x fsdp x expert samples of a microbatch, S sequence.
"""

from __future__ import annotations

from collections.abc import Mapping

import jax
import numpy as np
from jax.sharding import NamedSharding

from megajax.config.data import DataConfig
from megajax.config.model import ModelConfig
from megajax.config.parallel import AXES, REPLICAS
from megajax.models.families import batch_arrays
from megajax.models.model import Batch
from megajax.parallel.context import token_order
from megajax.parallel.rules import Rules


def batch_shardings(rules: Rules, model: ModelConfig, data: DataConfig) -> dict[str, NamedSharding]:
    """Return the sharding of every array of a batch [M, B, ...], by name: samples over replicas, positions over
    context.
    """
    axes = (None, "batch", "sequence")
    arrays = batch_arrays(model, data)
    return {
        name: NamedSharding(rules.mesh, rules.in_compute(axes[: 2 + len(array.shape)], AXES))
        for name, array in arrays.items()
    }


class Feed:
    """Cut global batches into microbatches on one mesh."""

    def __init__(self, rules: Rules, micro_batch_size: int, shardings: Mapping[str, NamedSharding]) -> None:
        """Cut batches into arrays with these `shardings`, which are those of the step's inputs (`batch_shardings`)."""
        self.width = micro_batch_size * rules.size(*REPLICAS)
        self.context = rules.size("context")
        self.shardings = shardings

    def microbatches(self, global_batch_size: int) -> int:
        """Return the number M of microbatches in a global batch of this size (see `config.checks.check_batch`)."""
        return global_batch_size // self.width

    def rows(self, global_batch_size: int) -> np.ndarray:
        """List the samples of a global batch that this process needs, in ascending order."""
        shape = (self.microbatches(global_batch_size), self.width)
        held = np.zeros(shape, bool)
        for index in self.shardings["sample_ids"].addressable_devices_indices_map(shape).values():
            held[index] = True
        return np.flatnonzero(held)

    def place(self, batch: Mapping[str, np.ndarray], global_batch_size: int) -> Batch:
        """Turn host arrays of the rows `rows(global_batch_size)` into global arrays, sharded for the step."""
        shape = (self.microbatches(global_batch_size), self.width)
        position = np.full(global_batch_size, -1)
        rows = self.rows(global_batch_size)
        position[rows] = np.arange(len(rows))
        position = position.reshape(shape)

        def place(name: str, host: np.ndarray) -> jax.Array:
            if host.ndim > 1:
                host = host[:, token_order(host.shape[1], self.context)]

            def shard(index: tuple[slice, ...] | None) -> np.ndarray:
                assert index is not None
                return host[position[index[:2]]][(slice(None), slice(None), *index[2:])]

            return jax.make_array_from_callback((*shape, *host.shape[1:]), self.shardings[name], shard)

        return {name: place(name, host) for name, host in batch.items()}
