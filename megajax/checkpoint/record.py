"""The record of a checkpoint: JSON beside the arrays, whose fingerprints are still being computed as a save begins.

It says what the arrays are and has to be right itself: it is sealed with its own hash.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from typing import Any

import jax
import orbax.checkpoint as ocp
from etils import epath
from orbax.checkpoint.future import CommitFutureAwaitingContractedSignals, Future

from megajax.checkpoint.fingerprint import Words, digits

FORMAT_VERSION = 3


def described(record: dict[str, Any], arrays: dict[str, jax.Array]) -> dict[str, Any]:
    """The record with the kind of every array: dtype, then shape."""
    kinds = {name: [str(array.dtype), *array.shape] for name, array in arrays.items()}
    return {"version": FORMAT_VERSION, **record, "arrays": kinds}


def complete(record: dict[str, Any], words: Words) -> dict[str, Any]:
    """The record as it is stored; waits for the fingerprints."""
    return {**record, "fingerprint": digits(words)}


def seal(document: dict[str, Any]) -> str:
    """A document as JSON that holds the SHA-256 of the rest of itself."""
    return json.dumps({**document, "sha256": _hash(document)})


def unseal(text: str) -> dict[str, Any]:
    """The document.

    Raises:
        ValueError: it is not what was sealed.
    """
    document = json.loads(text)
    if not isinstance(document, dict) or document.pop("sha256", None) != _hash(document):
        raise ValueError("the record is not what was saved")
    return document


def _hash(document: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(document).encode()).hexdigest()


class RecordHandler(ocp.AsyncCheckpointHandler):
    """Writes the record in Orbax's background thread, where waiting for the fingerprints delays nobody."""

    async def async_save(self, directory: epath.Path, args: RecordSave) -> list[Future]:
        """Start writing, once Orbax has made the directory."""
        return [CommitFutureAwaitingContractedSignals(self._write(directory, args), name="record")]

    def save(self, directory: epath.Path, args: RecordSave) -> None:
        """Write now."""
        raise NotImplementedError("Orbax saves asynchronous handlers with `async_save`")

    def restore(self, directory: epath.Path, args: RecordRestore | None = None) -> dict[str, Any]:
        """The record in `directory`.

        Raises:
            OSError, ValueError: there is none, or it is damaged.
        """
        del args
        try:
            return unseal((directory / "metadata").read_text())
        except ValueError as error:
            raise ValueError(f"{directory}: {error}") from error

    async def _write(self, directory: epath.Path, args: RecordSave) -> None:
        if jax.process_index() == 0:
            (directory / "metadata").write_text(seal(complete(args.record, args.words)))


@ocp.args.register_with_handler(RecordHandler, for_save=True)
@dataclass
class RecordSave(ocp.args.CheckpointArgs):
    """What `RecordHandler` writes."""

    record: dict[str, Any]
    """As `described` gives it."""
    words: Words


@ocp.args.register_with_handler(RecordHandler, for_restore=True)
@dataclass
class RecordRestore(ocp.args.CheckpointArgs):
    """It reads the whole record."""
