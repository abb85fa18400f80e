"""Start of a run from the weights of a trained model, with a fresh optimizer and schedule from step 0."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from megajax.checkpoint.store import Checkpoints
from megajax.config.base import InputError
from megajax.config.config import Config
from megajax.config.load import load_run, start_values
from megajax.config.run_files import same_paths
from megajax.data.tokenizers import Tokenizer
from megajax.interop.hf.transfer import carry_over, import_model, read_start, source_files
from megajax.made_from import MadeFrom, sources_in
from megajax.models.parameters import annotate, logical_axes, named_leaves
from megajax.training.run_directory import RunDirectory
from megajax.training.state import CanonicalForm, TrainState

log = logging.getLogger(__name__)


def start_of(init_from: str, output_dir: str) -> Mapping[str, Any]:
    """Read the values by key that `init_from` implies, if it names no run that exists; nothing is written.

    Raises:
        InputError: `init_from` names neither run nor model, or a model that has no counterpart here.
    """
    run = RunDirectory(Path(output_dir))
    names = _began_from(run) if run.config_file.is_file() else []
    if not Path(init_from).exists() and any(same_paths(name, init_from) for name in names):
        return start_values(load_run(run.path).config)  # it is not needed any more
    if not Path(init_from, "config.json").is_file():
        known = f"; {run.path} began from {names[0]}: name that, or {run.restart}" if names else ""
        raise InputError(
            f"init_from {init_from} is neither a run (config.yaml) nor a Hugging Face model (config.json), from "
            f"{Path.cwd()}{known}"
        )
    return read_start(Path(init_from))


def prepare_start(config: Config, run: RunDirectory, trained: bool) -> None:
    """Turn the Hugging Face model that `init_from` may name into a run inside this one, and record what it was.

    Args:
        config: configuration of the run, whose `init_from` names the model, or another run.
        run: run that begins from it.
        trained: whether the run has begun and has a checkpoint.

    Raises:
        InputError: the model cannot be imported, or is not the one that the run began from.
    """
    name = config.init_from
    if not trained:
        shutil.rmtree(run.huggingface, ignore_errors=True)  # what an earlier start has carried over
    if name is None:
        if not trained:
            run.start_record.unlink(missing_ok=True)
        return
    if trained:
        _require_start(name, run)
    elif _is_run(name):
        shutil.rmtree(run.start, ignore_errors=True)
        _contents(name).make(run.start_record, lambda: None)
    else:

        def make() -> None:
            shutil.rmtree(run.start, ignore_errors=True)
            import_model(Path(name), run.start)

        _contents(name).ensure(str(run.start), run.start_record, make, there=run.start.exists(), trained="")


def start_from(
    config: Config, run: RunDirectory, state: TrainState, canonical: CanonicalForm, tokenizer: Tokenizer
) -> TrainState:
    """Return the state with the weights of the newest checkpoint of `init_from`, read straight into their shards.

    The files that came with these weights from Hugging Face are copied into `run`.

    Raises:
        InputError: there is no checkpoint, or it has weights of other shapes or a larger vocabulary.
    """
    assert config.init_from is not None
    path = config.init_from if _is_run(config.init_from) else run.start
    start, its = RunDirectory.open(path)
    with Checkpoints(start.checkpoints(its.checkpoint), None, start.owner) as checkpoints:
        if checkpoints.latest is None:
            raise InputError(f"init_from {path} has no finished checkpoint: train it first")
        like, at = canonical.abstract.params, canonical.shardings.params
        params, record = checkpoints.restore(like, at, part="params")
    learned, wanted = its.model.vocab_size or record["tokenizer"]["vocab_size"], config.model.vocab_size
    if wanted != learned:
        params = grow_vocabulary(params, learned, wanted or 0, canonical.shardings.params, str(path))
    carry_over(start, run, record["tokenizer"], tokenizer)
    if record["tokenizer"] != tokenizer.identity:
        log.warning("init_from %s was trained with another tokenizer: its embedding means other words", path)
    log.info("weights of %s, step %d: optimizer and schedule start afresh", path, record["step"])
    return canonical.back(canonical.of(state)._replace(params=params))


def grow_vocabulary(params: Any, learned: int, wanted: int, shardings: Any, path: str) -> Any:
    """Return weights of a larger vocabulary, whose new rows (embedding, head, bias) are the mean of the learned ones.

    Args:
        params: weights, with zeros behind the learned rows.
        learned: number of rows that were trained, without those that pad the vocabulary.
        wanted: number of rows that count from now on.
        shardings: shardings of the weights.
        path: name of the run that they came from, for messages.

    Raises:
        InputError: the vocabulary is smaller, so that learned rows would be lost.
    """
    if wanted < learned:
        raise InputError(
            f"init_from {path} has a vocabulary of {learned} and this run one of {wanted}, without rows that were "
            f"learned: leave model.vocab_size unset, or set it to {learned} or more"
        )

    def grown(name: str, leaf: Any) -> jax.Array:
        values = leaf[...]
        if "vocab" not in logical_axes(leaf):
            return values
        dim = logical_axes(leaf).index("vocab")
        row = jax.lax.broadcasted_iota(np.int32, values.shape, dim)
        mean = jnp.where(row < learned, values, 0).sum(dim, keepdims=True) / learned
        return jnp.where((row >= learned) & (row < wanted), mean, values)

    names = [name for name, leaf in named_leaves(params) if "vocab" in logical_axes(leaf)]
    log.info(
        "the vocabulary grows from %d to %d: new rows of %s are the mean of the learned ones",
        learned, wanted, ", ".join(names),
    )  # fmt: skip
    return jax.jit(lambda tree: annotate(tree, grown), out_shardings=shardings, donate_argnums=0)(params)


def _require_start(name: str, run: RunDirectory) -> None:
    """Make sure that a run began from what `init_from` names, which may be another model by now under its old name."""
    names = _began_from(run)
    if any(same_paths(began, name) for began in names):
        return  # nothing of it is read any more
    began = names[0]
    problem: str | None = f"{name} is not there"
    if Path(name).exists():
        problem = _contents(name).difference(run.start_record)
        if problem is None and Path(began).name == run.start.name:  # an older version named its own import
            problem = ""
    if problem != "":
        raise InputError(
            f"{run.path} began from {began}, not from init_from {name} ({problem or 'another name'}): name that, or "
            "choose another output_dir"
        )


def _began_from(run: RunDirectory) -> list[str]:
    """Return the names of what a run began from: the one under which it was last seen, and the first one."""
    seen, first = sources_in(run.start_record), load_run(run.path).config.init_from
    return [*([str(Path(seen[0]).parent)] if seen else []), *([first] if first else [])]


def _is_run(name: str) -> bool:
    return RunDirectory(Path(name)).config_file.is_file()


def _contents(name: str) -> MadeFrom:
    """Return the files by which starts are told apart; config.yaml is enough for a run, as it names its place."""
    files = [RunDirectory(Path(name)).config_file] if _is_run(name) else source_files(Path(name))
    return MadeFrom(files, {})
