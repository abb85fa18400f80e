"""A copy of the state for as long as it is being written, so that the next training step may overwrite its buffers."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp


class Snapshot:
    """The copy; its memory is used again for the next one.

    Only CPU devices need it, where Orbax sees the very buffers of the state: while it does, a step that donates them
    copies everything instead (measured: 20 times slower, and another state of memory). From a GPU Orbax itself copies
    to pinned host memory before it returns.
    """

    def __init__(self) -> None:
        self._held: dict[str, jax.Array] = {}
        self._copy: Any = None

    def take(self, arrays: dict[str, jax.Array]) -> dict[str, jax.Array]:
        """The arrays as they are now. Nobody may read the copy before any more: its memory is overwritten.

        Fresh memory costs a page fault per 4 KiB: copying 0.5 GB took 0.33 s into fresh and 0.06 s into used memory.
        """
        if jax.default_backend() != "cpu":
            return arrays
        shardings = jax.tree.map(lambda array: array.sharding, arrays)
        if jax.tree.map(_kind, self._held) != jax.tree.map(_kind, arrays):
            self._held = jax.jit(_copies, out_shardings=shardings)(arrays)
            self._copy = jax.jit(_copies_into, out_shardings=shardings, donate_argnums=0, keep_unused=True)
        else:
            self._held = self._copy(self._held, arrays)
        return jax.block_until_ready(self._held)


def _kind(array: jax.Array) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=array.sharding)


def _copies(arrays: dict[str, jax.Array]) -> dict[str, jax.Array]:
    return jax.tree.map(jnp.copy, arrays)


def _copies_into(used: dict[str, jax.Array], arrays: dict[str, jax.Array]) -> dict[str, jax.Array]:
    """XLA puts results into the memory of donated arguments."""
    del used
    return _copies(arrays)
