"""Starting from a trained model: its weights, with a fresh optimizer and schedule from step 0."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from pathlib import Path

from megajax.checkpoint.store import Checkpoints
from megajax.cluster import detect
from megajax.config.base import ConfigError
from megajax.config.load import Loaded
from megajax.data.tokenizers import Tokenizer
from megajax.training.canonical import CanonicalForm
from megajax.training.huggingface import import_model
from megajax.training.run_directory import RunDirectory
from megajax.training.state import TrainState

log = logging.getLogger(__name__)


def import_start(loaded: Loaded) -> Sequence[str]:
    """Make a run of the Hugging Face model that `init_from` may name, in OUTPUT_DIR/init_from; the words that name it.

    Raises:
        ConfigError: it is neither run nor model, it cannot be imported, or each of several processes would do so.
    """
    config = loaded.config
    if config.init_from is None or RunDirectory(Path(config.init_from)).config_file.is_file():
        return ()
    if not Path(config.init_from, "config.json").is_file():
        raise ConfigError(
            f"init_from {config.init_from} is neither a run (config.yaml) nor a Hugging Face model (config.json)"
        )
    if detect(os.environ, config.cluster).processes > 1:
        raise ConfigError(
            f"init_from {config.init_from} is no run yet, and several processes would import it: "
            f"python -m megajax.convert import {config.init_from} --out RUN first, then init_from=RUN"
        )
    target = RunDirectory(Path(config.output_dir)).start
    if not target.exists():
        import_model(Path(config.init_from), target)
    return (f"init_from={target}",)


def start_from(path: str, state: TrainState, canonical: CanonicalForm, tokenizer: Tokenizer) -> TrainState:
    """The state with the weights of a run's newest checkpoint, read straight into their shards.

    Raises:
        ConfigError: it has no checkpoint, or weights of other shapes.
    """
    run, config = RunDirectory.open(path)
    with Checkpoints(run.checkpoints(config.checkpoint), None) as checkpoints:
        if checkpoints.latest is None:
            raise ConfigError(f"init_from {path} has no finished checkpoint: train it first")
        like, at = canonical.abstract.params, canonical.shardings.params
        params, record = checkpoints.restore(like, at, part="params")
    if record["tokenizer"] != tokenizer.identity:
        log.warning("init_from %s was trained with another tokenizer: its embedding means other words", path)
    log.info("weights of %s, step %d: optimizer and schedule start afresh", path, record["step"])
    return canonical.back(canonical.of(state)._replace(params=params))
