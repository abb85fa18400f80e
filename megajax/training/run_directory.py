"""The output directory of a run: who owns it, and what is where.

    config.yaml      every value of the run          data/         token files made from data.text
    checkpoints/     one directory a step            tokenizer.*   a tokenizer trained for the run
    metrics.jsonl    one record a step               tensorboard/
    goodput.json     where the time went             profile/      traces
    config.lock      held while the run trains     init_from/    a run of an imported model

The first start writes config.yaml; a later start must want the same run. Values that shape the result may not change.
"""

from __future__ import annotations

import fcntl
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from megajax.config.base import ConfigError, NotReady
from megajax.config.cluster import ClusterConfig
from megajax.config.config import Config
from megajax.config.load import dump_config, flat_values, load_config
from megajax.config.train import CheckpointConfig

FREE = (
    "output_dir", "parallel", "cluster", "health", "log", "evaluation", "profile",
    "model.vocab_multiple", "train.steps", "train.samples", "train.global_batch_size", "train.rampup",
    "train.micro_batch_size", "train.remat", "train.attention",
    "checkpoint.every", "checkpoint.keep_last", "checkpoint.keep_every", "checkpoint.keep_best",
    "checkpoint.asynchronous", "checkpoint.local", "checkpoint.local_every",
    "train.deterministic", "train.exit_duration", "data.prefetch", "data.cache_dir",
    "data.path", "data.train_path",
)  # fmt: skip
"""Keys and sections that may differ when a run is resumed: layout, reporting, saving, faults, how long it runs, and
the mix of sources and batch size, for which the samples read so far are accounted (`data.consumed`)."""


@dataclass(frozen=True)
class RunDirectory:
    """Paths of a run."""

    path: Path

    @property
    def config_file(self) -> Path:
        """Values of the first start."""
        return self.path / "config.yaml"

    @property
    def start(self) -> Path:
        """A run of the Hugging Face model that `init_from` names, made before this one begins."""
        return self.path / "init_from"

    def checkpoints(self, config: CheckpointConfig) -> str:
        """Where checkpoints are: what the configuration says, or a folder of the run."""
        return config.directory or str(self.path / "checkpoints")

    @contextmanager
    def locked(self, first: bool) -> Iterator[None]:
        """Keep other starts out of the directory; the system lets go of it when this process ends, however it ends.

        Of several processes the `first` does it for all.

        Raises:
            NotReady: another process is training into it.
        """
        if not first:
            yield
            return
        with self.path.joinpath("config.lock").open("w") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise NotReady(
                    f"another process is training into {self.path}: wait for it, or choose another output_dir"
                ) from None
            yield

    @classmethod
    def claim(cls, config: Config) -> RunDirectory:
        """Take the directory for a run of `config`, or find it taken by that very run.

        Raises:
            ConfigError: it holds another run, or files that are no run.
        """
        run = cls(Path(config.output_dir))
        # Until there is more than config.yaml nothing has begun, and what a failed start got wrong may be corrected.
        files = (path for path in run.path.rglob("*") if path.is_file() and run.start not in path.parents)
        if any(path.stem != "config" for path in files):
            if not run.config_file.exists():
                raise ConfigError(f"{run.path} holds files but no run (no config.yaml): choose another output_dir")
            run._require_same(config)
            return run
        try:
            run.path.mkdir(parents=True, exist_ok=True)
            temporary = run.config_file.with_suffix(".tmp")
            temporary.write_text(dump_config(replace(config, cluster=ClusterConfig())), encoding="utf-8")
            temporary.replace(run.config_file)
        except OSError as error:
            raise ConfigError(f"output_dir {run.path} cannot be written ({error.strerror}): choose another") from error
        return run

    @classmethod
    def open(cls, path: str | Path, overrides: Sequence[str] = ()) -> tuple[RunDirectory, Config]:
        """An existing run and its configuration, with `KEY=VALUE` words that override it.

        Raises:
            ConfigError: there is none.
        """
        run = cls(Path(path))
        if not run.config_file.is_file():
            raise ConfigError(f"{path} is not a run of megajax: it has no config.yaml")
        return run, load_config(run.config_file.resolve(), overrides).config

    def _require_same(self, config: Config) -> None:
        before = flat_values(load_config(self.config_file.resolve()).config)
        for key, value in flat_values(config).items():
            if before[key] != value and not any(key == free or key.startswith(f"{free}.") for free in FREE):
                raise ConfigError(
                    f"{self.path} holds another run: its {key} is {_short(before[key])}, now {_short(value)}; "
                    "choose another output_dir, or delete it to start over"
                )


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
