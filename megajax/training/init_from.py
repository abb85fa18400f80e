"""Starting from a trained model: its weights, with a fresh optimizer and schedule from step 0."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from megajax.checkpoint.store import Checkpoints
from megajax.cluster import detect
from megajax.config.base import ConfigError
from megajax.config.config import Config
from megajax.config.load import Loaded
from megajax.data.tokenizers import Tokenizer
from megajax.models.parameters import annotate, logical_axes, named_leaves
from megajax.training.canonical import CanonicalForm
from megajax.training.huggingface import carry_over, import_model
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


def start_from(
    config: Config, run: RunDirectory, state: TrainState, canonical: CanonicalForm, tokenizer: Tokenizer
) -> TrainState:
    """The state with the weights of the newest checkpoint that `init_from` has, read straight into their shards.

    What came with those weights from Hugging Face goes over into `run`.

    Raises:
        ConfigError: it has no checkpoint, weights of other shapes, or a larger vocabulary.
    """
    assert config.init_from is not None
    path = config.init_from
    start, its = RunDirectory.open(path)
    with Checkpoints(start.checkpoints(its.checkpoint), None) as checkpoints:
        if checkpoints.latest is None:
            raise ConfigError(f"init_from {path} has no finished checkpoint: train it first")
        like, at = canonical.abstract.params, canonical.shardings.params
        params, record = checkpoints.restore(like, at, part="params")
    learned, wanted = its.model.vocab_size or record["tokenizer"]["vocab_size"], config.model.vocab_size
    if wanted != learned:
        params = with_vocabulary(params, learned, wanted or 0, canonical.shardings.params, path)
    carry_over(start.path, run.path, record["tokenizer"], tokenizer)
    if record["tokenizer"] != tokenizer.identity:
        log.warning("init_from %s was trained with another tokenizer: its embedding means other words", path)
    log.info("weights of %s, step %d: optimizer and schedule start afresh", path, record["step"])
    return canonical.back(canonical.of(state)._replace(params=params))


def with_vocabulary(params: Any, learned: int, wanted: int, shardings: Any, path: str) -> Any:
    """Weights of a larger vocabulary: its new rows (embedding, head, bias) are the mean of the learned ones.

    Args:
        params: with zeros behind the learned rows.
        learned: rows that were trained, without those that pad the vocabulary.
        wanted: rows that count from now on.
        shardings: of the weights.
        path: where they came from.

    Raises:
        ConfigError: the vocabulary is smaller: learned rows would be lost.
    """
    if wanted < learned:
        raise ConfigError(
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
