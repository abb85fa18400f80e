"""Record of a checkpoint, which is JSON beside the arrays, and the check of what is read against it.

The record says what the arrays are and has to be right itself, so it is sealed with its own hash. Fingerprints are
still being computed as a save begins. What is read is checked against what is wanted, and against the fingerprints.
"""

from __future__ import annotations

import hashlib
import json
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp
from etils import epath
from orbax.checkpoint.future import CommitFutureAwaitingContractedSignals, Future

from megajax.checkpoint.arrays import open_arrays, read_arrays
from megajax.checkpoint.errors import may_pass, reason
from megajax.checkpoint.fingerprint import Words, digits, words
from megajax.config.base import InputError, NotReady
from megajax.processes import first

log = logging.getLogger(__name__)

FORMAT_VERSION = 3
PAUSES = (1.0, 4.0)
"""Seconds to wait before what a disk or network failed to read is read again."""
Contents = tuple[dict[str, jax.Array], dict[str, Any]]
"""Arrays by name, and the record."""


def described(record: dict[str, Any], arrays: dict[str, jax.Array]) -> dict[str, Any]:
    """Return a record with the kind of every array: dtype, then shape."""
    kinds = {name: [str(array.dtype), *array.shape] for name, array in arrays.items()}
    return {"version": FORMAT_VERSION, **record, "arrays": kinds}


def complete(record: dict[str, Any], words: Words) -> dict[str, Any]:
    """Return a record with the fingerprints, for which it waits, in the form that is stored."""
    return {**record, "fingerprint": digits(words)}


def seal(document: dict[str, Any]) -> str:
    """Write a document as JSON that holds the SHA-256 of the rest of itself."""
    return json.dumps({**document, "sha256": _hash(document)})


def unseal(text: str) -> dict[str, Any]:
    """Read a sealed document.

    Raises:
        ValueError: the document is not what was sealed.
    """
    document = json.loads(text)
    if not isinstance(document, dict) or document.pop("sha256", None) != _hash(document):
        raise ValueError("the record is not what was saved")
    return document


def _hash(document: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(document).encode()).hexdigest()


class RecordHandler(ocp.AsyncCheckpointHandler):
    """Write the record in Orbax's background thread, where waiting for the fingerprints delays nobody."""

    async def async_save(self, directory: epath.Path, args: RecordSave) -> list[Future]:
        """Start writing the record once Orbax has made the directory."""
        return [CommitFutureAwaitingContractedSignals(self._write(directory, args), name="record")]

    def save(self, directory: epath.Path, args: RecordSave) -> None:
        """Refuse to write at once, which Orbax does not ask for."""
        raise NotImplementedError("Orbax saves asynchronous handlers with `async_save`")

    def restore(self, directory: epath.Path, args: RecordRestore | None = None) -> dict[str, Any]:
        """Read the record in `directory`.

        Raises:
            OSError, ValueError: there is no record, or it is damaged.
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
    """The record that `RecordHandler` is to write."""

    record: dict[str, Any]
    """Record with the kind of every array (see `described`)."""
    words: Words


@ocp.args.register_with_handler(RecordHandler, for_restore=True)
@dataclass
class RecordRestore(ocp.args.CheckpointArgs):
    """Ask `RecordHandler` for the whole record."""


def read_contents(path: epath.Path, wanted: dict[str, jax.ShapeDtypeStruct], prefix: str, tables: set[str]) -> Contents:
    """Read arrays and record of a checkpoint, without a barrier: a process that fails holds up no other.

    Args:
        path: directory of one step.
        wanted: shape, dtype and sharding of the arrays by name; the checkpoint has to hold just these among the names
            that begin with `prefix`.
        prefix: part of the state that is read, with a dot, or "" for all.
        tables: names of arrays whose rows beyond the vocabulary are zero, and as many as a layout needs.

    Raises:
        InputError: the checkpoint is of another model or version.
        Exception: the checkpoint is damaged.
    """
    if not (path / "state").exists() and not (path / "record").exists():
        raise InputError(f"{path} is not a checkpoint of megajax: choose another directory")
    record = RecordHandler().restore(path / "record")
    if record["version"] != FORMAT_VERSION:
        raise InputError(
            f"{path} has checkpoint format {record['version']}, this version of megajax reads "
            f"{FORMAT_VERSION}: use the version that wrote it"
        )
    saved = {name: kind for name, kind in record["arrays"].items() if name.startswith(prefix)}
    other = "it was saved from another model or version"
    for name in wanted.keys() - saved.keys():
        raise InputError(f"{path} lacks {name}, which this model has: {other}")
    for name in saved.keys() - wanted.keys():
        raise InputError(f"{path} holds {name}, which this model lacks: {other}")
    for name, leaf in wanted.items():
        if problem := _mismatch(saved[name], leaf, is_table=name in tables):
            raise InputError(f"{path}: {name} {problem}: {other}")
    stored = open_arrays(path / "state", list(wanted))
    for name, array in stored.items():
        if saved[name] != [str(array.dtype), *array.shape]:
            raise ValueError(f"{array.path / '.zarray'} is not what was saved")
    for name in tables:
        rows, (there, *others) = wanted[name].shape[0], stored[name].shape
        if rows < there and stored[name].read(((rows, there), *((0, n) for n in others))).any():
            raise InputError(f"{path}: {name} has words beyond the {rows} rows of this model: {other}")
    return read_arrays(stored, wanted), record


def verified(read: Callable[[], Contents]) -> Contents | str:
    """Return what `read` gives if its fingerprints are right everywhere, else what is wrong, the same everywhere.

    Raises:
        NotReady: a disk or network failed at every attempt, which says nothing of the contents.
    """
    contents, problem, unreadable = None, "", ""
    for pause in (*PAUSES, None):
        problem, unreadable = "", ""
        try:
            contents = read()
        except (InputError, MemoryError, jax.errors.JaxRuntimeError):
            raise
        except Exception as error:  # what a flipped bit may lead to has no end: a division by a zero in `.zarray`, say
            if may_pass(error):
                unreadable = reason(error)
            else:
                problem = reason(error)
        if not unreadable or pause is None:
            break
        log.warning("reading again in %g s: %s", pause, unreadable)
        time.sleep(pause)
    if unreadable := first(unreadable):
        raise NotReady(f"a checkpoint cannot be read just now ({unreadable}): it was left as it is, try again")
    problem = first(problem)
    if contents is None or problem:
        return problem
    arrays, record = contents
    for name, found in digits(words(arrays)).items():
        if found != record["fingerprint"][name]:
            return f"the contents of {name} are not what was saved"
    return contents


def _mismatch(saved: list[Any], leaf: jax.ShapeDtypeStruct, *, is_table: bool) -> str:
    """Describe how a saved array differs in kind from the wanted one; "" if it does not."""
    rows = 1 if is_table else 0
    dtype, there = jnp.dtype(saved[0]), tuple(saved[1:])
    if there[rows:] != leaf.shape[rows:]:
        return f"is {there} there and {leaf.shape} in this model"
    if dtype != leaf.dtype and not (jnp.issubdtype(dtype, jnp.floating) and jnp.issubdtype(leaf.dtype, jnp.floating)):
        return f"is {dtype} there and {leaf.dtype} in this model"
    return ""
