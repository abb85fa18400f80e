"""Checkpoints: Orbax, asynchronous, atomic, verified, from any mesh to any mesh.

A checkpoint holds every array of the train state under its dotted name ("params.blocks.attention.qkv", all layers in
one) and one JSON record: step, consumed samples, tokenizer, and a fingerprint of every array. Names, shapes and
fingerprints say nothing about the layout. Orbax writes into a temporary directory and renames it last, so a killed save
is no checkpoint; what is damaged later shows by its fingerprints when it is read, and is passed over.

The directory may be any path that etils.epath knows. Local ones are tested; object stores (gs://...) go the ways that
Orbax and TensorStore have for them, and were never tried.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from types import TracebackType
from typing import Any, NamedTuple, Self, TypeVar

import jax
import orbax.checkpoint as ocp
from etils import epath

from megajax.checkpoint.arrays import named_arrays
from megajax.checkpoint.contents import Contents, read_contents, reason, verified
from megajax.checkpoint.fingerprint import words
from megajax.checkpoint.local import LocalCopies
from megajax.checkpoint.quiet import quiet_orbax
from megajax.checkpoint.record import RecordHandler, RecordSave
from megajax.checkpoint.retention import Retention
from megajax.checkpoint.snapshot import Snapshot
from megajax.config.base import ConfigError
from megajax.config.train import CheckpointConfig
from megajax.models.parameters import annotate, logical_axes, named_leaves

S = TypeVar("S")
log = logging.getLogger(__name__)


class Restored(NamedTuple):
    """A train state and the record saved beside it."""

    state: Any
    record: dict[str, Any]


class Checkpoints:
    """The checkpoints of one run. With several processes, all of them open, save, wait and restore together."""

    def __init__(self, directory: str | os.PathLike[str], config: CheckpointConfig | None) -> None:
        """Open (or create) the directory; `config` says which checkpoints stay, see `retention.kept`.

        Without a configuration it is opened to be read, be it that of a run that is still training: nothing is changed.
        """
        quiet_orbax()
        path = epath.Path(directory)
        self.directory = path if "://" in str(path) else path.resolve()
        self._writable, self._config = config is not None, config or CheckpointConfig()
        self._retention, self._snapshot, self._newest = Retention(self._config), Snapshot(), -1
        if self._writable:
            with self._saving():
                self.directory.mkdir(parents=True, exist_ok=True)
        if self._writable and jax.process_index() == 0:
            for unfinished in sorted(self.directory.glob("*orbax-checkpoint-tmp*")):
                log.warning("%s is the rest of a save that was interrupted: ignored and removed", unfinished)
        self._manager = self._open_manager()
        self._local = LocalCopies(self._config.local, self.directory) if self._config.local else None
        if self._config.keep_best:
            self._retention.losses |= {step: loss for step in self.steps if (loss := self._loss(step)) is not None}

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
        """Steps of the finished checkpoints as this process sees them, ascending."""
        return sorted(found.step for found in ocp.step.standard_name_format().find_all(self.directory))

    @property
    def latest(self) -> int | None:
        """Newest step that can be resumed from, local copies included; all processes have the same."""
        finished = [step for step in self._manager.all_steps() if step != self._newest or self._is_finished(step)]
        copy = self._local.latest if self._local else None
        return max(finished if copy is None else [*finished, copy], default=None)

    def save(self, step: int, state: Any, record: dict[str, Any], loss: float | None = None) -> float:
        """Start writing; returns once the state is copied, so that the next step may overwrite its buffers.

        Args:
            step: nothing is done if it has a checkpoint.
            state: tree of arrays.
            record: what has to be known besides, as JSON.
            loss: validation loss, if this step was evaluated.

        Returns:
            Seconds for which it blocked.

        Raises:
            ConfigError: this save, or the one before it that ran in the background, could not be written.
        """
        start = time.perf_counter()
        with self._saving():
            self._manager.wait_until_finished()
            if step in self._manager.all_steps():
                return time.perf_counter() - start
            if loss is not None:
                self._retention.losses[step] = loss
                record = {**record, "loss": loss}
            arrays = named_arrays(state)
            if self._config.asynchronous:
                arrays = self._snapshot.take(arrays)
            items = ocp.args.Composite(state=ocp.args.PyTreeSave(arrays), record=RecordSave(record, words(arrays)))
            self._manager.save(step, args=items, force=True)
            self._newest = step
        return time.perf_counter() - start

    def save_local(self, step: int, state: Any, record: dict[str, Any]) -> float:
        """Start writing a copy to `checkpoint.local`, each process what it holds; returns the seconds it blocked.

        Raises:
            ConfigError: the copy before this one could not be written.
        """
        start = time.perf_counter()
        if self._local:
            with self._saving_local():
                self._local.save(step, named_arrays(state), record)
        return time.perf_counter() - start

    def wait(self) -> None:
        """Block until every save is on disk.

        Raises:
            ConfigError: a save could not be written.
        """
        with self._saving():
            self._manager.wait_until_finished()
            self._manager.check_for_errors()
        if self._local:
            with self._saving_local():
                self._local.wait()

    def restore(self, like: S, shardings: S, step: int | None = None, part: str = "") -> Restored:
        """Read a checkpoint straight into its place on the current mesh; each host reads only what it holds.

        Args:
            like: the state's shapes and dtypes (`jax.eval_shape`); floating-point numbers are converted to them.
            shardings: where every array goes, same structure.
            step: which checkpoint; None for the newest good one: those that are damaged are named in a warning and
                renamed, so that their steps can be saved again, and a newer local copy goes first.
            part: what `like` is of the state ("params", say); the rest is not read.

        Raises:
            ConfigError: there is no such checkpoint, it is damaged, or its arrays are not those of this model.
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
            arrays, record = self._newest_good(wanted, prefix, tables)
        else:
            self._require(step)
            path = self.directory / str(step)
            found = verified(lambda: read_contents(path, wanted, prefix, tables))
            if isinstance(found, str):
                raise ConfigError(f"{path} is damaged ({found}): choose another checkpoint")
            if self._local and (self._local.latest or 0) > step:
                self._local.forget()  # what follows is another future of this step
            arrays, record = found
        # One after the other, so that only one of them exists twice.
        return Restored(annotate(like, lambda name, leaf: arrays.pop(prefix + name).astype(leaf.dtype)), record)

    def _newest_good(self, wanted: dict[str, jax.ShapeDtypeStruct], prefix: str, tables: set[str]) -> Contents:
        steps = sorted(self._manager.all_steps(), reverse=True)
        local, copy = self._local, self._local.latest if self._local and not prefix else None
        if local and copy is not None and copy > max(steps, default=-1):
            found = verified(lambda: local.read(copy, wanted))
            if not isinstance(found, str):
                _tell(logging.INFO, "resuming from the local copies of step %d in %s", copy, self._config.local)
                return found
            _tell(logging.WARNING, "the local copies of step %d are of no use: %s", copy, found)
            local.forget()
        if not steps:
            self._require(None)
        for step in steps:
            path = self.directory / str(step)
            found = verified(lambda: read_contents(path, wanted, prefix, tables))  # noqa: B023 - called at once
            if not isinstance(found, str):
                return found
            _tell(logging.WARNING, "%s is damaged (%s): passed over", path, found)
            if self._writable:
                self._set_aside(step)
        raise ConfigError(f"every checkpoint in {self.directory} is damaged: restore one of them, or start anew")

    def record(self, step: int) -> dict[str, Any]:
        """The JSON record of one checkpoint."""
        path = self.directory / str(step)
        with _one_line(f"reading {path}", "it is damaged: choose another checkpoint"):
            return RecordHandler().restore(path / "record")

    def _loss(self, step: int) -> float | None:
        try:
            return self.record(step).get("loss")
        except ConfigError:
            return None

    def _require(self, step: int | None) -> None:
        if not self.directory.exists():
            raise ConfigError(f"{self.directory} does not exist: no checkpoint to restore")
        if step not in self._manager.all_steps():
            found = ", ".join(map(str, self._manager.all_steps())) or "none"
            raise ConfigError(f"{self.directory} has no finished checkpoint of step {step}: finished are {found}")

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
        try:
            self.wait()
        except ConfigError as second:
            if error is None:
                raise
            log.warning("%s", second)
        finally:
            if self._local:
                self._local.close()
            self._manager.close()

    def _saving(self) -> AbstractContextManager[None]:
        remedy = "free space or change output_dir; finished checkpoints are intact, run the same command to resume"
        return _one_line(f"saving a checkpoint to {self.directory}", remedy)

    def _saving_local(self) -> AbstractContextManager[None]:
        return _one_line(f"saving a local copy to {self._config.local}", "free space there or unset checkpoint.local")


def _tell(level: int, message: str, *args: Any) -> None:
    if jax.process_index() == 0:
        log.log(level, message, *args)


@contextmanager
def _one_line(what: str, remedy: str) -> Iterator[None]:
    """Turn what Orbax and the file system raise into one line that names the directory."""
    try:
        yield
    except ConfigError:
        raise
    except Exception as error:
        raise ConfigError(f"{what} failed ({reason(error)}): {remedy}") from error
