"""The output directory of a run: its files, its owner and its lock.

    config.yaml      every value of the run        data/         token files made from data.text
    run.json         its identity                  tokenizer/    its tokenizer, copied or trained
    checkpoints/     one directory a step          tensorboard/
    metrics.jsonl    one record a step             profile/      traces
    goodput.json     where the time went           init_from/    a run of an imported model
    returns.json     how often it went back to which checkpoint, if `health.policy` is "rollback"
    config.lock      held while the run trains     init_from.json, */made_from.json: see `megajax.made_from`

The first start writes config.yaml, and a later start must ask for the same run: values that shape the result may not
change. The directory holds all that generation, evaluation and export need, and can be moved, copied and renamed.
"""

from __future__ import annotations

import json
import logging
import uuid
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from etils import epath

from megajax.checkpoint.directory import Owner, belongs, holds_checkpoints, own
from megajax.config.base import InputError, NotReady
from megajax.config.config import CheckpointConfig, ClusterConfig, Config
from megajax.config.keys import PATH_KEYS, flat_values
from megajax.config.load import dump_run, load_run
from megajax.config.run_files import CAME_WITH_MODEL, CONFIG, IDENTITY, TOKENIZER_FILES, same_paths
from megajax.data.blend import parse_data_path
from megajax.files import atomic_write, held_alone, remove_leftovers

log = logging.getLogger(__name__)

FREE = (
    "output_dir", "parallel", "cluster", "health", "log", "evaluation", "profile",
    "model.vocab_multiple", "train.steps", "train.samples", "train.global_batch_size", "train.rampup",
    "train.micro_batch_size", "train.remat", "train.attention",
    "checkpoint.every", "checkpoint.keep_last", "checkpoint.keep_every", "checkpoint.keep_best",
    "checkpoint.asynchronous", "checkpoint.local", "checkpoint.local_every",
    "train.deterministic", "train.exit_duration", "data.prefetch", "data.cache_dir",
    "data.path", "data.train_path",
)  # fmt: skip
"""Keys and sections that may differ when a run is resumed.

They are layout, reporting, saving, faults and length, and also the mix of sources and the batch size, because a run
keeps account of the samples that it has read (`data.consumed`).
"""
SOURCES = ("init_from", "data.text", *(f"tokenizer.{name}" for name in TOKENIZER_FILES))
"""Keys of files from which a part of the run was made; their contents are compared, not names (`megajax.made_from`)."""


@dataclass(frozen=True)
class RunDirectory:
    """The paths of a run, and guard its directory."""

    path: Path

    @property
    def config_file(self) -> Path:
        """Return the file that holds the values of the first start."""
        return self.path / CONFIG

    @property
    def identity_file(self) -> Path:
        """Return the file that holds the identity of the run."""
        return self.path / IDENTITY

    @property
    def start(self) -> Path:
        """Return the folder of the run that is made of the Hugging Face model in `init_from` before this one begins."""
        return self.path / "init_from"

    @property
    def start_record(self) -> Path:
        """Return the file that records the weights with which the run began."""
        return self.path / "init_from.json"

    @property
    def huggingface(self) -> Path:
        """Return the folder for the small files of the Hugging Face model from which the run was made, if it was."""
        return self.path / CAME_WITH_MODEL

    @property
    def restart(self) -> str:
        """Return advice on how to resume the run from any folder."""
        return f"start python -m megajax.train {self.config_file}"

    @property
    def returns_file(self) -> Path:
        """Return the file that counts the returns to each checkpoint."""
        return self.path / "returns.json"

    def checkpoints(self, config: CheckpointConfig) -> str:
        """Return the place of the checkpoints: the one in the configuration, or a folder of the run."""
        return config.directory or str(self.path / "checkpoints")

    @property
    def owner(self) -> Owner | None:
        """Return this run as the owner of its checkpoints, or None for a run of an older version."""
        try:
            return Owner(json.loads(self.identity_file.read_text(encoding="utf-8"))["id"], str(self.path.absolute()))
        except FileNotFoundError:
            return None
        except (ValueError, LookupError, TypeError):
            raise InputError(
                f"{self.identity_file} is damaged: restore it; owner.json beside the checkpoints has the same id"
            ) from None

    def identify(self) -> None:
        """Give the run an identity if it has none; it stays the same when the directory is moved."""
        if not self.identity_file.exists():
            self._write(self.identity_file, json.dumps({"id": uuid.uuid4().hex}) + "\n")

    @contextmanager
    def locked(self, first: bool) -> Iterator[None]:
        """Keep other starts out of the directory until the block ends; the system frees the lock of a process that
        dies.

        The `first` of several processes takes the lock for all.

        Raises:
            InputError: the directory cannot be written, or holds files that are not those of a run.
            NotReady: another process is training in it.
        """
        if not first:
            yield
            return
        files = (path for path in self.path.rglob("*") if path.is_file())
        if not self.config_file.exists() and any(path.name.lstrip(".").split(".")[0] != "config" for path in files):
            raise InputError(f"{self.path} holds files but no run (no config.yaml): choose another output_dir")
        busy = NotReady(f"another process is training into {self.path}: wait for it, or choose another output_dir")
        with ExitStack() as held:
            with self._writing():
                self.path.mkdir(parents=True, exist_ok=True)
                held.enter_context(held_alone(self.path / "config.lock", busy))
            yield

    def claim(self, config: Config) -> None:
        """Claim the locked directory for a run of `config`, or make sure that it belongs to that very run.

        Until there is a checkpoint nothing has begun, so values of the first start may still be corrected.

        Raises:
            InputError: the directory holds another run.
        """
        if config.init_from and same_paths(config.init_from, str(self.path)):
            raise InputError(f"init_from is {config.init_from}, the output_dir itself: name another run or model")
        if not self._has_begun():
            self._write(self.config_file, dump_run(self._without_place(config), self.path))
        else:
            before = load_run(self.path).config
            self._require_same(before, config)
            if not self.identity_file.exists():
                log.info("%s is a run of an older version: from now on it has an identity", self.path)
                self._write(self.config_file, dump_run(self._without_place(before), self.path))
                self.identify()
                own(epath.Path(self.checkpoints(before.checkpoint)), self.owner)
        self.identify()

    @classmethod
    def open(cls, path: str | Path, overrides: Sequence[str] = ()) -> tuple[RunDirectory, Config]:
        """Open an existing run and return it with its configuration, in which `KEY=VALUE` words override values.

        Raises:
            InputError: there is no run.
        """
        run = cls(Path(path).expanduser())
        if not run.config_file.is_file():
            raise InputError(f"{path} is not a run of megajax: it has no config.yaml")
        return run, load_run(run.path, overrides).config

    def _has_begun(self) -> bool:
        """Tell whether there is a checkpoint of this run, here or where the first start put it."""
        if not self.config_file.exists():
            return False
        directory = epath.Path(self.checkpoints(load_run(self.path).config.checkpoint))
        return holds_checkpoints(directory) and belongs(directory, self.owner)

    @staticmethod
    def _without_place(config: Config) -> Config:
        return replace(config, cluster=ClusterConfig())

    def _write(self, file: Path, text: str) -> None:
        with self._writing():
            remove_leftovers(file)
            with atomic_write(file) as new:
                new.write(text.encode())

    @contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise InputError(f"output_dir {self.path} cannot be written ({error.strerror}): choose another") from error

    def _require_same(self, before: Config, config: Config) -> None:
        old = flat_values(before)
        for key, value in flat_values(config).items():
            if key in ("data.path", "data.train_path") and old[key] and value:
                self._require_found(key, old[key], value)
            if any(key == free or key.startswith(f"{free}.") for free in FREE):
                continue
            if not _is_same(key, old[key], value):
                then, now = _short(old[key]), _short(value)
                remedy = "choose another output_dir, or delete it to start over"
                if key in PATH_KEYS and value:
                    then, now = repr(old[key]), f"{value!r} in {Path.cwd()}"
                    remedy = f"{self.restart}, or choose another output_dir"
                raise InputError(f"{self.path} holds another run: its {key} is {then}, now {now}; {remedy}")

    def _require_found(self, key: str, before: Sequence[str], now: Sequence[str]) -> None:
        """Make sure that token files with relative names are found, since the run may have begun in another folder."""
        for source in parse_data_path(now):
            if not Path(source.prefix).is_absolute() and not Path(f"{source.prefix}.idx").exists():
                known = ", ".join(source.prefix for source in parse_data_path(before))
                raise InputError(
                    f"{key}: {source.prefix}.idx is not in {Path.cwd()}, and {self.path} began with {known}: "
                    f"name that, or {self.restart}"
                )


def _is_same(key: str, before: Any, now: Any) -> bool:
    """Tell whether two values of a key mean the same; for `SOURCES`, compare how many are named."""
    if key in SOURCES:
        return key.startswith("tokenizer.") or _count(before) == _count(now)
    return same_paths(before, now) if key in PATH_KEYS else before == now


def _count(value: Any) -> int:
    return len(value) if isinstance(value, tuple) else int(value is not None)


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
