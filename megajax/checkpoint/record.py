"""The record of a checkpoint: JSON beside the arrays, whose fingerprints are still being computed as a save begins."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import jax
import orbax.checkpoint as ocp
from etils import epath
from orbax.checkpoint.future import CommitFutureAwaitingContractedSignals, Future

from megajax.checkpoint.fingerprint import Words, digits

FORMAT_VERSION = 2


def complete(record: dict[str, Any], words: Words) -> dict[str, Any]:
    """The record as it is stored; waits for the fingerprints."""
    return {"version": FORMAT_VERSION, **record, "fingerprint": digits(words)}


class RecordHandler(ocp.AsyncCheckpointHandler):
    """Writes the record in Orbax's background thread, where waiting for the fingerprints delays nobody."""

    async def async_save(self, directory: epath.Path, args: RecordSave) -> list[Future]:
        """Start writing, once Orbax has made the directory."""
        return [CommitFutureAwaitingContractedSignals(self._write(directory, args), name="record")]

    def save(self, directory: epath.Path, args: RecordSave) -> None:
        """Write now."""
        raise NotImplementedError("Orbax saves asynchronous handlers with `async_save`")

    def restore(self, directory: epath.Path, args: RecordRestore | None = None) -> dict[str, Any]:
        """The record in `directory`."""
        del args
        try:
            return json.loads((directory / "metadata").read_text())
        except ValueError as error:
            raise ValueError(f"{directory}: {error}") from error

    async def _write(self, directory: epath.Path, args: RecordSave) -> None:
        if jax.process_index() == 0:
            (directory / "metadata").write_text(json.dumps(complete(args.record, args.words)))


@ocp.args.register_with_handler(RecordHandler, for_save=True)
@dataclass
class RecordSave(ocp.args.CheckpointArgs):
    """What `RecordHandler` writes."""

    record: dict[str, Any]
    words: Words


@ocp.args.register_with_handler(RecordHandler, for_restore=True)
@dataclass
class RecordRestore(ocp.args.CheckpointArgs):
    """It reads the whole record."""
