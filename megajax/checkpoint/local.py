"""Extra copies on a fast directory of every host: NVMe, or /dev/shm against crashes that leave the host up.

    DIRECTORY/RUN/process-I/STEP/   one raw file for each distinct shard that the process holds, and manifest.json

Each process writes alone, without a barrier, and reads back only its own files. So a copy serves the same layout on the
same hosts, if every process has it whole; everything else needs the run's own directory.
"""

from __future__ import annotations

import json
import shutil
import uuid
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import jax
import numpy as np
from etils import epath

from megajax.checkpoint.arrays import Snapshot, empty, place, read_into, shards
from megajax.checkpoint.fingerprint import Words, words
from megajax.checkpoint.record import complete, described, seal, unseal
from megajax.processes import gather

_NAME = "local-copies"


class LocalCopies:
    """Write, find and read the local copies of one run."""

    def __init__(self, directory: str, run: epath.Path) -> None:
        """Look for the copies of `run`, the directory of its checkpoints; all processes call it together.

        A name that is kept in `run` ties the copies to it: a run that starts over does not find those of its
        predecessor, and the copy of a run leaves them to the original.
        """
        self._directory, self._run = Path(directory), run
        self._name_file = run / _NAME
        self._name = gather(self._name_file.read_text() if self._name_file.exists() else "")[0]
        if any(gather(self._original())):
            self._name = ""
        self._snapshot = Snapshot()
        self._thread = ThreadPoolExecutor(1, "local-copy")
        self._writing: tuple[int, Future[None]] | None = None
        held = gather(" ".join(map(str, self._complete())))
        self.steps = set.intersection(*(set(map(int, steps.split())) for steps in held))
        """Steps of the copies that every process has."""

    def save(self, step: int, arrays: dict[str, jax.Array], record: dict[str, Any]) -> None:
        """Copy what this process holds, and write the copy in the background.

        Raises:
            OSError: the copy before this one could not be written.
        """
        self.wait()
        if not self._name:
            name = uuid.uuid4().hex
            if jax.process_index() == 0:
                self._name_file.write_text(name)
            self._name = gather(name)[0]  # after the name is on disk: a crash leaves no copies that nobody knows
        parts, held = {}, self._snapshot.take(arrays)
        for name, array in held.items():
            array.copy_to_host_async()
            parts[name] = {shard.device: shard.data for shard in array.addressable_shards}
        files = {
            f"{name}.{number}": np.asarray(parts[name][devices[0]])
            for name, array in arrays.items()
            for number, devices in enumerate(shards(array).values())
        }
        manifest = {"run": str(self._run), "layout": _layout(arrays), "record": described(record, arrays)}
        self._writing = step, self._thread.submit(self._write, step, files, manifest, words(held))

    def wait(self) -> None:
        """Wait until the copy is written.

        Raises:
            OSError: it could not be written.
        """
        writing, self._writing = self._writing, None
        if writing:
            step, done = writing
            done.result()
            self.steps = {*sorted(self.steps)[-1:], step}

    def read(self, step: int, wanted: dict[str, jax.ShapeDtypeStruct]) -> tuple[dict[str, jax.Array], dict[str, Any]]:
        """Read arrays and record of a copy.

        Raises:
            ValueError: the copy is of another layout or model, or damaged.
            OSError: the copy cannot be read, or not to its end.
        """
        path = self._process / str(step)
        manifest = unseal((path / "manifest.json").read_text())
        if manifest["layout"] != _layout(wanted):
            raise ValueError("it is of another layout or model")
        arrays = {}
        for name, leaf in wanted.items():
            parts = {index: empty(index, leaf.dtype) for index in shards(leaf)}
            for number, part in enumerate(parts.values()):
                read_into(epath.Path(path / f"{name}.{number}"), 0, part)
            arrays[name] = place(leaf, parts)
        return arrays, manifest["record"]

    def forget(self, after: int) -> None:
        """Remove the copies of steps after this one, from which the run goes on."""
        self.wait()
        for step in self._complete():
            if step > after:
                shutil.rmtree(self._process / str(step))
        self.steps = {step for step in self.steps if step <= after}

    def remove(self) -> None:
        """Remove this run's copies, then the name that ties them to it; all processes call it together."""
        self.wait()
        self.steps = set()
        shutil.rmtree(self._process, ignore_errors=True)
        gather("all have removed theirs")
        with suppress(OSError):  # another process on this host was first
            self._process.parent.rmdir()
        if jax.process_index() == 0:
            self._name_file.unlink(missing_ok=True)
        self._name = ""

    def close(self, *, wait: bool) -> None:
        """End the background thread, after what it is writing if `wait` is true."""
        self._thread.shutdown(wait)

    @property
    def _process(self) -> Path:
        return self._directory / (self._name or "-") / f"process-{jax.process_index()}"

    def _original(self) -> str:
        """Return the directory of the other run that has these copies, or "" if there is none or it has moved here."""
        for step in self._complete()[-1:]:
            with suppress(OSError, ValueError):
                place = unseal((self._process / str(step) / "manifest.json").read_text()).get("run", str(self._run))
                name = epath.Path(place) / _NAME
                if place != str(self._run) and name.exists() and name.read_text() == self._name:
                    return place
        return ""

    def _complete(self) -> list[int]:
        return sorted(int(path.name) for path in self._process.glob("*") if path.name.isdigit())

    def _write(self, step: int, files: dict[str, np.ndarray], manifest: dict[str, Any], prints: Words) -> None:
        """Write a copy; the newest one stays until this one is complete, and others go to make room for it."""
        for old in self._process.glob("*"):
            if old.name != str(max(self.steps, default=None)):
                shutil.rmtree(old)
        unfinished = self._process / f"{step}.unfinished"
        unfinished.mkdir(parents=True)
        for name, part in files.items():
            part.tofile(unfinished / name)
        (unfinished / "manifest.json").write_text(seal(manifest | {"record": complete(manifest["record"], prints)}))
        # Not synced: what a crash of the host tears is recognized by its fingerprint.
        unfinished.replace(self._process / str(step))


def _layout(arrays: dict[str, Any]) -> Any:
    """Describe the shapes and dtypes of arrays, and what this process holds of them, as JSON gives it back."""
    held = {name: [array.shape, str(array.dtype), list(shards(array))] for name, array in arrays.items()}
    return json.loads(json.dumps({"processes": jax.process_count(), "arrays": held}))
