"""Collectives over mesh axes, left out where an axis has size 1.

XLA refuses some collectives over axes of size 1 in a partly manual region. All functions here are called inside a
`jax.shard_map` that is manual over the axes they name.
"""

from __future__ import annotations

import jax
from jax.sharding import AbstractMesh, Mesh


class Collectives:
    """Run collectives over the axes of one mesh."""

    def __init__(self, mesh: Mesh | AbstractMesh) -> None:
        """Remember the sizes of the axes, and which are longer than 1."""
        self.sizes = dict(mesh.shape)
        self.active = {axis for axis, size in mesh.shape.items() if size > 1}

    def _axes(self, axes: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(axis for axis in axes if axis in self.active)

    def psum(self, x: jax.Array, *axes: str) -> jax.Array:
        """Sum x over the devices along `axes`."""
        return jax.lax.psum(x, names) if (names := self._axes(axes)) else x

    def pmax(self, x: jax.Array, *axes: str) -> jax.Array:
        """Take the maximum of x over the devices along `axes`."""
        return jax.lax.pmax(x, names) if (names := self._axes(axes)) else x

    def all_gather(self, x: jax.Array, axis: str, dim: int) -> jax.Array:
        """Concatenate the shards along `axis` in dimension `dim`."""
        return jax.lax.all_gather(x, axis, axis=dim, tiled=True) if axis in self.active else x

    def reduce_scatter(self, x: jax.Array, axis: str, dim: int) -> jax.Array:
        """Sum x over `axis` and leave each device its slice of dimension `dim`."""
        return jax.lax.psum_scatter(x, axis, scatter_dimension=dim, tiled=True) if axis in self.active else x

    def swap_order(self, x: jax.Array, first: str, second: str, *, back: bool = False) -> jax.Array:
        """Exchange pieces of an array cut over two axes, so that `first` cuts it before `second` instead of after it.

        Each device sends its piece to one other device. The axes are given in the order of the mesh; `back` undoes the
        exchange.
        """
        if not {first, second} <= self.active:
            return x
        rows, columns = self.sizes[first], self.sizes[second]
        pairs = [(i * columns + j, j * rows + i) for i in range(rows) for j in range(columns)]
        return jax.lax.ppermute(x, (first, second), [pair[::-1] for pair in pairs] if back else pairs)

    def index(self, *axes: str) -> jax.Array | int:
        """Return this device's index along `axes`, of which the first varies slowest."""
        return jax.lax.axis_index(names) if (names := self._axes(axes)) else 0

    def shift(self, x: jax.Array, axis: str, by: int) -> jax.Array:
        """Send x to the device `by` places further along the ring `axis`."""
        size = self.sizes[axis]
        return jax.lax.ppermute(x, axis, [(i, (i + by) % size) for i in range(size)]) if size > 1 else x
