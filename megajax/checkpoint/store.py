"""Checkpoints by Orbax, which are asynchronous, atomic and verified, and go from any mesh to any mesh.

A checkpoint holds every array of the train state under its dotted name ("params.blocks.attention.qkv", all layers in
one) and one JSON record: step, consumed samples, tokenizer, dtype, shape and fingerprint of every array, and a hash of
itself. None of it depends on the layout. Orbax writes into a temporary directory and renames it last, so a killed save
is no checkpoint; what is damaged later shows by its fingerprints when it is read, and is passed over.

The directory may be any path that etils.epath knows. Local ones are tested; object stores (gs://...) are read and
written as Orbax and TensorStore do, and were never tried.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from types import TracebackType
from typing import Any, NamedTuple, Self, TypeVar

import jax
import orbax.checkpoint as ocp
from etils import epath

from megajax.checkpoint.arrays import Snapshot, named_arrays
from megajax.checkpoint.directory import Owner, Retention, check_owner, take
from megajax.checkpoint.errors import check_reachable, may_pass, one_line, quiet_orbax, reason
from megajax.checkpoint.fingerprint import words
from megajax.checkpoint.local import LocalCopies
from megajax.checkpoint.record import Contents, RecordHandler, RecordSave, described, read_contents, verified
from megajax.config.base import InputError, NotReady
from megajax.config.config import CheckpointConfig
from megajax.models.parameters import annotate, logical_axes, named_leaves
from megajax.processes import gather

S = TypeVar("S")
log = logging.getLogger(__name__)


class Restored(NamedTuple):
    """A train state and the record saved beside it."""

    state: Any
    record: dict[str, Any]


class Checkpoints:
    """Save and restore the checkpoints of one run; several processes open, save, wait and restore together."""

    def __init__(
        self, directory: str | os.PathLike[str], config: CheckpointConfig | None, owner: Owner | None = None
    ) -> None:
        """Open (or create) the directory; `config` says which checkpoints stay, see `directory.kept`.

        Without a configuration the directory is opened to be read, even that of a run that is still training: nothing
        is changed in it.

        Raises:
            InputError: the directory cannot be reached, or is not that of the run `owner`.
        """
        quiet_orbax()
        path = epath.Path(directory)
        self.directory = path if "://" in str(path) else path.resolve()
        self._writable, self._config = config is not None, config or CheckpointConfig()
        self._retention, self._snapshot = Retention(self._config), Snapshot()
        self._being_saved: int | None = None
        self._needs = self._free = 0
        check_reachable(self.directory)
        if self._writable:
            with self._saving():
                self.directory.mkdir(parents=True, exist_ok=True)
                if owner:
                    take(self.directory, owner, first=jax.process_index() == 0)
        elif owner:
            check_owner(self.directory, owner)
        if self._writable and jax.process_index() == 0:
            for unfinished in sorted(self.directory.glob("*orbax-checkpoint-tmp*")):
                log.warning("%s is the rest of a save that was interrupted: ignored and removed", unfinished)
        self._manager = self._open_manager()
        self._local = LocalCopies(self._config.local, self.directory) if self._config.local else None
        if self._config.keep_best:
            self._retention.losses |= self._losses()

    def _open_manager(self) -> ocp.CheckpointManager:
        count = jax.process_count()
        options = ocp.CheckpointManagerOptions(
            create=False,
            cleanup_tmp_directories=self._writable,
            preservation_policy=self._retention,
            enable_async_checkpointing=self._config.asynchronous,
            # Barriers of the coordination service instead of ones that wait for the devices.
            multiprocessing_options=ocp.options.MultiprocessingOptions(
                active_processes=set(range(count)) if count > 1 else None
            ),
            async_options=ocp.AsyncOptions(barrier_sync_fn=_barrier(count)),
            single_host_load_and_broadcast=True,  # all processes go by the list that process 0 sees
            lightweight_initialize=True,
            save_root_metadata=False,
        )
        # Weights are noise, and compressing them doubled the time. OCDBT, Orbax's default, gathers small arrays in few
        # files; here are few arrays. Plain files are written from where the array lies: no copies are in flight that
        # would need a limit. Cut into chunks they took twice the time and memory for 0.6 of the state.
        state = ocp.PyTreeCheckpointHandler(use_ocdbt=False, use_compression=False)
        return ocp.CheckpointManager(
            self.directory, options=options, item_handlers={"state": state, "record": RecordHandler()}
        )

    @property
    def steps(self) -> list[int]:
        """List the steps of the finished checkpoints, ascending, as process 0 sees them; all processes ask together."""
        unfinished = self._being_saved
        if unfinished is not None and gather("finished" if self._is_finished(unfinished) else "")[0]:
            unfinished = None
        return sorted(int(step) for step in self._manager.all_steps() if step != unfinished)

    @property
    def latest(self) -> int | None:
        """Return the newest step that can be resumed from, local copies included; all processes get the same."""
        return max({*self.steps, *(self._local.steps if self._local else ())}, default=None)

    def save(self, step: int, state: Any, record: dict[str, Any], loss: float | None = None) -> float:
        """Start writing a checkpoint, and return once the state is copied, so that the next step may overwrite its
        buffers.

        Args:
            step: step of the checkpoint; if it exists, nothing is done.
            state: train state, or any other tree of arrays.
            record: values that are needed besides the arrays, as JSON.
            loss: validation loss, if this step was evaluated.

        Returns:
            Seconds for which it blocked.

        Raises:
            InputError: this save, or the one before it that ran in the background, could not be written.
        """
        start = time.perf_counter()
        with self._saving():
            self._wait()
            if step in self._manager.all_steps():
                return time.perf_counter() - start
            if loss is not None:
                self._retention.losses[step] = loss
                record = {**record, "loss": loss}
            arrays = named_arrays(state)
            self._needs = sum(array.nbytes for array in arrays.values())
            if "://" not in str(self.directory):
                self._free = shutil.disk_usage(self.directory).free
            if self._config.asynchronous:
                arrays = self._snapshot.take(arrays)
            about = RecordSave(described(record, arrays), words(arrays))
            items = ocp.args.Composite(state=ocp.args.PyTreeSave(arrays), record=about)
            self._manager.save(step, args=items, force=True)
            self._being_saved = step
        return time.perf_counter() - start

    def save_local(self, step: int, state: Any, record: dict[str, Any]) -> float:
        """Start writing what each process holds to `checkpoint.local`, and return the seconds for which it blocked.

        Raises:
            InputError: the copy before this one could not be written.
        """
        start = time.perf_counter()
        if self._local:
            with self._saving_local():
                self._local.save(step, named_arrays(state), record)
        return time.perf_counter() - start

    def wait(self) -> None:
        """Wait until every save is on disk.

        Raises:
            InputError: a save could not be written.
        """
        with self._saving():
            self._wait()
        if self._local:
            with self._saving_local():
                self._local.wait()

    def finish(self) -> None:
        """Wait for every save, then remove the local copies: the run has ended, and its last step is on disk."""
        self.wait()
        if self._local:
            self._local.remove()

    def restore(self, like: S, shardings: S, step: int | None = None, part: str = "") -> Restored:
        """Read a checkpoint straight into its place on the current mesh, each host only what it holds.

        Args:
            like: shapes and dtypes of the state (`jax.eval_shape`), to which floating-point numbers are converted.
            shardings: sharding of every array, in the same structure.
            step: step of the checkpoint, or None for the newest good one. Damaged ones are named in a warning and
                renamed then, so that their steps can be saved again. Local copies count, and newer ones are removed.
            part: part of the state that `like` is ("params", say), or "" for all; the rest is not read.

        Raises:
            InputError: there is no such checkpoint, it is damaged, or its arrays are not those of this model.
        """
        prefix = f"{part}." if part else ""
        wanted = {
            prefix + name: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)
            for (name, leaf), sharding in zip(named_leaves(like), jax.tree.leaves(shardings), strict=True)
        }
        # Rows past the vocabulary depend on the layout and are zero: read as many as this layout has.
        tables = {prefix + name for name, leaf in named_leaves(like) if "vocab" in logical_axes(leaf)}
        self.wait()
        self._manager.reload()
        if step is None:
            step, (arrays, record) = self._newest_good(wanted, prefix, tables)
        else:
            self._require(step)
            path = self.directory / str(step)
            found = verified(lambda: read_contents(path, wanted, prefix, tables))
            if isinstance(found, str):
                raise InputError(f"{path} is damaged ({found}): choose another checkpoint")
            arrays, record = found
        if self._local and not part:
            self._local.forget(after=step)  # what follows is another future of this step
        # One after the other, so that only one of them exists twice.
        return Restored(annotate(like, lambda name, leaf: arrays.pop(prefix + name).astype(leaf.dtype)), record)

    def _newest_good(
        self, wanted: dict[str, jax.ShapeDtypeStruct], prefix: str, tables: set[str]
    ) -> tuple[int, Contents]:
        """Return the step and the contents of the newest good checkpoint, local copies included."""
        local = None if prefix else self._local
        copies = [(step, False) for step in local.steps] if local else []
        candidates = [*((step, True) for step in self.steps), *copies]
        if not candidates:
            self._require(None)
        for step, is_own in sorted(candidates, reverse=True):
            path = self.directory / str(step)
            if is_own or local is None:
                found = verified(lambda: read_contents(path, wanted, prefix, tables))  # noqa: B023 - called at once
            else:
                found = self._read_local(local, step, wanted)
            if not isinstance(found, str):
                if not is_own:
                    _tell(logging.INFO, "resuming from the local copies of step %d in %s", step, self._config.local)
                return step, found
            if not is_own:
                _tell(logging.WARNING, "the local copies of step %d are of no use: %s", step, found)
                continue
            _tell(logging.WARNING, "%s is damaged (%s): passed over", path, found)
            if self._writable:
                self._set_aside(step)
        raise InputError(f"every checkpoint in {self.directory} is damaged: restore one of them, or start anew")

    @staticmethod
    def _read_local(local: LocalCopies, step: int, wanted: dict[str, jax.ShapeDtypeStruct]) -> Contents | str:
        """Read a local copy; a host's disk that fails is no reason to wait, since there are other checkpoints."""
        try:
            return verified(lambda: local.read(step, wanted))
        except NotReady as error:
            return str(error)

    def check_room(self, state: Any, *, saved: bool) -> None:
        """Make sure that there is room for checkpoints of a state before anything is computed.

        Args:
            state: arrays that will be saved, or their shapes.
            saved: whether there is a checkpoint already; a lack of room is a warning then.

        Raises:
            InputError: there is no room for a single one; the message says what is needed and what there is.
        """
        if "://" in str(self.directory):
            return
        self._needs = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(state))
        self._free = free = int(gather(str(shutil.disk_usage(self.directory).free))[0])  # as process 0 sees it
        stay = self._config.keep_last + 1 - len(self.steps)  # one is written before another goes
        if self._needs > free and not saved:
            raise InputError(f"{self.directory}: {self._room()}: make room, or choose another checkpoint.directory")
        if self._needs * max(1, stay) > free:
            _tell(logging.WARNING, "%s: %s, for %d", self.directory, self._room(), max(1, stay))

    def _room(self) -> str:
        return f"a checkpoint needs {_size(self._needs)}, there are {_size(self._free)} free"

    def record(self, step: int) -> dict[str, Any]:
        """Read the JSON record of the checkpoint of a step."""
        path = self.directory / str(step)
        try:
            return RecordHandler().restore(path / "record")
        except (OSError, ValueError) as error:
            if may_pass(error):
                raise NotReady(f"{path} cannot be read just now ({reason(error)}): try again") from error
            raise InputError(f"{path} is damaged ({reason(error)}): choose another checkpoint") from error

    def _losses(self) -> dict[int, float]:
        """Return the validation losses by step, as process 0 reads them."""
        losses = {}
        for step in self.steps if jax.process_index() == 0 else ():
            with suppress(InputError):
                losses[step] = self.record(step).get("loss")
        found = json.loads(gather(json.dumps(losses))[0])
        return {int(step): loss for step, loss in found.items() if loss is not None}

    def _wait(self) -> None:
        self._manager.wait_until_finished()
        self._manager.check_for_errors()
        self._being_saved = None

    def _require(self, step: int | None) -> None:
        if not self.directory.exists():
            raise InputError(f"{self.directory} does not exist: no checkpoint to restore")
        if step not in self._manager.all_steps():
            found = ", ".join(map(str, self._manager.all_steps())) or "none"
            raise InputError(f"{self.directory} has no finished checkpoint of step {step}: finished are {found}")

    def _set_aside(self, step: int) -> None:
        """Rename a damaged checkpoint, so that its step can be saved again and it can be looked at."""
        if jax.process_index() == 0:
            damaged = self.directory / f"damaged-{step}"
            if damaged.exists():
                damaged.rmtree()
            (self.directory / str(step)).rename(damaged)
        self._retention.losses.pop(step, None)
        self._manager.reload()

    def _is_finished(self, step: int) -> bool:
        path = self.directory / str(step)
        return path.exists() and ocp.step.is_path_finalized(path)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        alone = error is not None and jax.process_count() > 1  # whoever else was saving may never come
        try:
            if not alone:
                self.wait()
        except Exception as second:
            if error is None:
                raise
            log.warning("%s", second)
        finally:
            if self._local:
                self._local.close(wait=not alone)
            if not alone:
                self._manager.close()

    def _saving(self) -> AbstractContextManager[None]:
        remedy = "free space or change output_dir; finished checkpoints are intact, run the same command to resume"
        return one_line(f"saving a checkpoint to {self.directory}", remedy, self._room)

    def _saving_local(self) -> AbstractContextManager[None]:
        return one_line(f"saving a local copy to {self._config.local}", "free space there or unset checkpoint.local")


def _size(count: int) -> str:
    return f"{count / 2**30:,.1f} GiB" if count >= 2**30 else f"{count / 2**20:,.1f} MiB"


def _barrier(processes: int) -> Callable[..., None]:
    """Return Orbax's barrier without the wait of a process whose save has failed: the others wait elsewhere."""
    wait = ocp.multihost.get_barrier_sync_fn(processes=set(range(processes)))

    def arrive(*, key: str, timeout_ms: int) -> None:
        if error := sys.exception():
            raise error
        wait(key=key, timeout_ms=timeout_ms)

    return arrive


def _tell(level: int, message: str, *args: Any) -> None:
    if jax.process_index() == 0:
        log.log(level, message, *args)
