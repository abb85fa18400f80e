"""Checkpoints: Orbax, asynchronous, atomic, from any mesh to any mesh.

A checkpoint holds every array of the train state under its dotted name ("params.blocks.attention.qkv", all layers in
one) and one JSON record: step, consumed samples and tokenizer. Names and shapes say nothing about the layout. Orbax
writes into a temporary directory and renames it last, so a killed save is no checkpoint.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Self, TypeVar

import jax
import orbax.checkpoint as ocp

from megajax.checkpoint.quiet import quiet_orbax
from megajax.config.base import ConfigError
from megajax.config.train import CheckpointConfig
from megajax.models.parameters import annotate, logical_axes, named_leaves

S = TypeVar("S")
FORMAT_VERSION = 1
log = logging.getLogger(__name__)


class Restored(NamedTuple):
    """A train state and the record saved beside it."""

    state: Any
    record: dict[str, Any]


class Checkpoints:
    """The checkpoints of one run, in `directory`."""

    def __init__(self, directory: Path, config: CheckpointConfig | None) -> None:
        """Open (or create) the directory; keeps the newest `keep_last` and every `keep_every`-th step.

        Without a configuration it is opened to be read, be it that of a run that is still training: nothing is created.
        """
        quiet_orbax()
        self.directory = directory.resolve()
        if config is None:
            options = ocp.CheckpointManagerOptions(create=False)
        else:
            for unfinished in sorted(self.directory.glob("*orbax-checkpoint-tmp*")):
                log.warning("%s is the rest of a save that was interrupted: ignored and removed", unfinished)
            options = ocp.CheckpointManagerOptions(
                max_to_keep=config.keep_last,
                keep_period=config.keep_every,
                enable_async_checkpointing=config.asynchronous,
            )
        handlers = {"state": ocp.PyTreeCheckpointHandler(), "record": ocp.JsonCheckpointHandler()}
        self._manager = ocp.CheckpointManager(self.directory, options=options, item_handlers=handlers)

    @property
    def steps(self) -> list[int]:
        """Steps of the finished checkpoints, ascending; one that is still being written has another name."""
        return sorted(int(path.name) for path in self.directory.glob("*") if path.name.isdigit())

    @property
    def latest(self) -> int | None:
        """Newest finished step."""
        return max(self.steps, default=None)

    def save(self, step: int, state: Any, record: dict[str, Any]) -> None:
        """Start writing; returns once the state is copied, so that the next step may overwrite its buffers.

        Raises:
            ConfigError: this save, or the one before it that ran in the background, could not be written.
        """
        if step in self._manager.all_steps():
            return
        arrays = {name: _array(leaf) for name, leaf in named_leaves(state)}
        items = ocp.args.Composite(
            state=ocp.args.PyTreeSave(arrays), record=ocp.args.JsonSave({"version": FORMAT_VERSION, **record})
        )
        with self._saving():
            self._manager.save(step, args=items, force=True)

    def wait(self) -> None:
        """Block until every save is on disk.

        Raises:
            ConfigError: a save could not be written.
        """
        with self._saving():
            self._manager.wait_until_finished()
            self._manager.check_for_errors()

    def restore(self, like: S, shardings: S, step: int | None = None, part: str = "") -> Restored:
        """Read a checkpoint straight into its place on the current mesh; each host reads only what it holds.

        Args:
            like: the state's shapes and dtypes (`jax.eval_shape`); floating-point numbers are converted to them.
            shardings: where every array goes, same structure.
            step: which checkpoint; None for the newest.
            part: what `like` is of the state ("params", say); the rest is not read.

        Raises:
            ConfigError: there is no such checkpoint, or its arrays are not those of this model.
        """
        step = self.latest if step is None else step
        if step is None or step not in self.steps:
            found = ", ".join(map(str, self.steps)) or "none"
            raise ConfigError(f"{self.directory} has no finished checkpoint of step {step}: finished are {found}")
        record = self.record(step)
        if record.get("version") != FORMAT_VERSION:
            raise ConfigError(
                f"{self.directory / str(step)} has checkpoint format {record.get('version')}, this version of megajax "
                f"reads {FORMAT_VERSION}: use the version that wrote it"
            )
        prefix = f"{part}." if part else ""
        # Rows past the vocabulary depend on the layout and are zero: read as many as this layout has.
        tables = {prefix + name for name, leaf in named_leaves(like) if "vocab" in logical_axes(leaf)}
        wanted = {
            prefix + name: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)
            for (name, leaf), sharding in zip(named_leaves(like), jax.tree.leaves(shardings), strict=True)
        }
        arguments = ocp.checkpoint_utils.construct_restore_args(wanted)
        for name in tables:
            arguments[name] = replace(arguments[name], strict=False)
        state = ocp.args.PyTreeRestore(wanted, restore_args=arguments, partial_restore=bool(part))
        with self._reading(step):
            self._check_arrays(step, wanted, prefix, tables)
            arrays = self._manager.restore(step, args=ocp.args.Composite(state=state))["state"]
        return Restored(annotate(like, lambda name, _: arrays[prefix + name]), record)

    def record(self, step: int) -> dict[str, Any]:
        """The JSON record of one checkpoint."""
        with self._reading(step):
            return self._manager.restore(step, args=ocp.args.Composite(record=ocp.args.JsonRestore()))["record"]

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
            self._manager.close()

    def _saving(self) -> AbstractContextManager[None]:
        remedy = "free space or change output_dir; finished checkpoints are intact, run the same command to resume"
        return _one_line(f"saving a checkpoint to {self.directory}", remedy)

    def _reading(self, step: int) -> AbstractContextManager[None]:
        path = self.directory / str(step)
        return _one_line(
            f"reading the checkpoint {path}", f"if it is damaged, remove {path} to resume from an older one"
        )

    def _check_arrays(self, step: int, wanted: dict[str, jax.ShapeDtypeStruct], prefix: str, tables: set[str]) -> None:
        metadata = self._manager.item_metadata(step)["state"]
        saved = {name: array for name, array in metadata.items() if name.startswith(prefix)}
        path = self.directory / str(step)
        for name in wanted.keys() - saved.keys():
            raise ConfigError(f"{path} lacks {name}, which this model has: it was saved from another model or version")
        for name in saved.keys() - wanted.keys():
            raise ConfigError(
                f"{path} holds {name}, which this model lacks: it was saved from another model or version"
            )
        for name, leaf in wanted.items():
            there, rows = tuple(saved[name].shape), 1 if name in tables else 0
            if there[rows:] != leaf.shape[rows:]:
                raise ConfigError(f"{path}: {name} is {there} there and {leaf.shape} in this model")


@contextmanager
def _one_line(what: str, remedy: str) -> Iterator[None]:
    """Turn what Orbax and the file system raise into one line that names the directory."""
    try:
        yield
    except ConfigError:
        raise
    except Exception as error:
        reason = " ".join(str(error).split())[-200:]  # what went wrong stands last
        raise ConfigError(f"{what} failed ({reason}): {remedy}") from error


def _array(leaf: Any) -> jax.Array:
    return leaf[...] if hasattr(leaf, "get_metadata") else leaf
