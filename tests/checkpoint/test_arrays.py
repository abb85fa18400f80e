"""Arrays that Orbax has written are read without it."""

from __future__ import annotations

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from etils import epath
from jax.sharding import NamedSharding, PartitionSpec, SingleDeviceSharding

from megajax.checkpoint import arrays
from megajax.checkpoint.arrays import StoredArray, empty, open_arrays, read_arrays

P = PartitionSpec
MESH = jax.make_mesh((2, 4), ("a", "b"))
SPECS = [P(), P("a"), P(None, "b"), P("a", "b"), P(("a", "b"), None), P(None, None, "b")]
VALUE = np.random.default_rng(0).standard_normal((8, 16, 4), np.float32)


@pytest.fixture(scope="module", params=SPECS, ids=str)
def saved(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> epath.Path:
    """One array, written by Orbax as it lies on some mesh."""
    path = epath.Path(tmp_path_factory.mktemp("arrays")) / "state"
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler(use_ocdbt=False, use_compression=False)) as writer:
        state = {"x": jax.device_put(VALUE, NamedSharding(MESH, request.param))}
        writer.save(path, args=ocp.args.PyTreeSave(state))
    return path


@pytest.mark.parametrize("block_bytes", [100, 1 << 20], ids=["by-row", "at-once"])
def test_from_any_mesh_to_any_mesh(saved: epath.Path, block_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whole rows and parts of rows, of one file and of several."""
    monkeypatch.setattr(arrays, "BLOCK_BYTES", block_bytes)
    stored = open_arrays(saved, ["x"])
    for spec in SPECS:
        place = NamedSharding(MESH, spec)
        value = read_arrays(stored, {"x": jax.ShapeDtypeStruct(VALUE.shape, jnp.float32, sharding=place)})["x"]
        assert value.sharding == place
        np.testing.assert_array_equal(value, VALUE)
    np.testing.assert_array_equal(stored["x"].read(((3, 5), (1, 14), (0, 3))), VALUE[3:5, 1:14, :3])


def test_missing_rows_are_zero_and_others_left_out(saved: epath.Path) -> None:
    """A table has as many rows as its layout pads it to."""
    for rows, spec in ((6, P("a")), (16, P(("a", "b")))):
        wanted = jax.ShapeDtypeStruct((rows, 16, 4), jnp.float32, sharding=NamedSharding(MESH, spec))
        value = np.array(read_arrays(open_arrays(saved, ["x"]), {"x": wanted})["x"])
        np.testing.assert_array_equal(value[:8], VALUE[:rows])
        assert not value[8:].any()


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.int32, jnp.uint8, jnp.bool_])
def test_every_kind_of_number(tmp_path: Path, dtype: jnp.dtype) -> None:
    """Scalars too."""
    state = {"x": jnp.arange(6).astype(dtype), "scalar": jnp.ones((), dtype)}
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler(use_ocdbt=False, use_compression=False)) as writer:
        writer.save(tmp_path / "state", args=ocp.args.PyTreeSave(state))
    place = SingleDeviceSharding(jax.devices()[0])
    wanted = {name: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place) for name, x in state.items()}
    read = read_arrays(open_arrays(epath.Path(tmp_path / "state"), wanted), wanted)
    for name, value in state.items():
        assert read[name].dtype == dtype
        np.testing.assert_array_equal(read[name], value)


def test_a_cpu_device_takes_memory_over() -> None:
    """No second copy while restoring."""
    for size in (1, 1000, 1_000_003):
        memory = empty(((0, size),), np.float32)
        memory[...] = 1
        assert jax.device_put(memory, jax.devices()[0]).unsafe_buffer_pointer() == memory.ctypes.data


def test_compressed_arrays_are_refused(tmp_path: Path) -> None:
    """They are not ours."""
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler(use_ocdbt=False)) as writer:
        writer.save(tmp_path / "state", args=ocp.args.PyTreeSave({"x": jnp.ones(3)}))
    with pytest.raises(ValueError, match="x is no uncompressed zarr array"):
        StoredArray.open(epath.Path(tmp_path / "state" / "x"))
