"""Ownership of a directory of checkpoints, and the choice of the checkpoints in it that stay.

The run that saves in a directory leaves its name there, and whoever opens the directory compares it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from etils import epath

from megajax.config.base import InputError
from megajax.config.config import CheckpointConfig
from megajax.config.run_files import IDENTITY

_FILE = "owner.json"


class Owner(NamedTuple):
    """Identify a run."""

    id: str
    """Identity of the run, which stays the same when the run is moved."""
    path: str
    """Path of the run, for messages."""


def holds_checkpoints(directory: epath.PathLike) -> bool:
    """Tell whether a run has saved here, even if it was no more than a copy on a faster disk."""
    path = epath.Path(directory)
    names = [child.name for child in path.iterdir()] if path.exists() else []
    return any(name.isdigit() or name == "local-copies" or name.startswith("damaged-") for name in names)


def check_owner(directory: epath.Path, owner: Owner) -> None:
    """Make sure that the checkpoints of a directory, if there are any, do not say that they are another run's.

    Raises:
        InputError: they are another run's; the message names both runs.
    """
    found = _owner(directory)
    if found is not None and found.id != owner.id:
        raise InputError(
            f"{directory} holds the checkpoints of the run {found.path}, not of {owner.path}: "
            "choose another checkpoint.directory (to start from those weights, set init_from to that run)"
        )


def belongs(directory: epath.Path, owner: Owner | None) -> bool:
    """Tell whether checkpoints are those of a run: they say so, or they say nothing and lie in the run.

    Args:
        directory: directory of the checkpoints.
        owner: the run; None for a run of an older version, to which a directory without a name belongs.
    """
    found = _owner(directory)
    if owner is None or found is not None:
        return found is None or (owner is not None and found.id == owner.id)
    return _lies_in(directory, owner)


def own(directory: epath.Path, owner: Owner | None) -> None:
    """Write the name of its run into a directory.

    Raises:
        InputError: the directory is another run's.
    """
    if owner is None:
        return
    check_owner(directory, owner)
    if _owner(directory) != owner:
        temporary = directory / f".{_FILE}"
        temporary.write_text(json.dumps(owner._asdict()) + "\n")
        temporary.replace(directory / _FILE)  # other processes read it meanwhile


def take(directory: epath.Path, owner: Owner, first: bool) -> None:
    """Make a directory the run's; checkpoints that do not say whose they are have to lie in the run.

    Args:
        directory: directory of the checkpoints.
        owner: the run that is about to save there.
        first: whether this process is the one of several that writes.

    Raises:
        InputError: the checkpoints may be another run's, or are those of the run that this one is a copy of.
    """
    check_owner(directory, owner)
    found = _owner(directory)
    if found is not None and not _lies_in(directory, owner) and _is_there(found, owner):
        raise InputError(
            f"{directory} holds the checkpoints of the run {found.path}, which {owner.path} is a copy of: go on with "
            "that one, or set init_from to it and choose another output_dir and checkpoint.directory"
        )
    if holds_checkpoints(directory) and not belongs(directory, owner):
        raise InputError(
            f"{directory} holds checkpoints of a run that it does not name, and {owner.path} has saved none there: "
            "choose another checkpoint.directory"
        )
    if first:
        own(directory, owner)


def _lies_in(directory: epath.Path, owner: Owner) -> bool:
    return Path(owner.path).resolve() in Path(directory).resolve().parents


def _is_there(found: Owner, owner: Owner) -> bool:
    """Tell whether the run `found` is still where it was, while `owner`, of the same identity, is somewhere else."""
    try:
        identity = json.loads(Path(found.path, IDENTITY).read_text(encoding="utf-8"))["id"]
        return identity == owner.id and not Path(found.path).samefile(owner.path)
    except (OSError, ValueError, LookupError, TypeError):
        return False


def _owner(directory: epath.Path) -> Owner | None:
    file = directory / _FILE
    try:
        return Owner(**json.loads(file.read_text()))
    except FileNotFoundError:
        return None
    except (ValueError, TypeError):
        raise InputError(f"{file} is damaged: delete it, if you know whose checkpoints these are") from None


def kept(steps: Iterable[int], config: CheckpointConfig, losses: Mapping[int, float]) -> set[int]:
    """Choose the steps whose checkpoints are kept.

    Args:
        steps: steps of the checkpoints that exist.
        config: rules of what stays: the newest `keep_last`, and those whose step is a multiple of `keep_every`. With
            `keep_best` the one of lowest loss takes the place of one of the newest, but never that of the very newest.
        losses: validation losses by step; a checkpoint without one does not compete.
    """
    newest_first = sorted(steps, reverse=True)
    rated = [step for step in newest_first if math.isfinite(losses.get(step, math.nan))]
    best = {min(rated, key=losses.__getitem__)} if config.keep_best and rated else set()
    others = [step for step in newest_first if step not in best]
    places = max(config.keep_last - len(best), 0 if best == set(newest_first[:1]) else 1)
    multiples = {step for step in newest_first if config.keep_every and step % config.keep_every == 0}
    return best | set(others[:places]) | multiples


@dataclass
class Retention:
    """Offer `kept` in the form in which Orbax asks for it; Orbax deletes the others once a save has finished."""

    config: CheckpointConfig
    losses: dict[int, float] = field(default_factory=dict)

    def should_preserve(self, checkpoints: Sequence[Any], *, context: Any) -> list[bool]:
        """Tell of every checkpoint in Orbax's list, which includes the one being saved, whether it stays."""
        del context
        keep = kept([checkpoint.step for checkpoint in checkpoints], self.config, self.losses)
        return [checkpoint.step in keep for checkpoint in checkpoints]
