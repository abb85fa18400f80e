"""From the configuration as the user wrote it to the one that a run needs: tokenizer, token files, vocabulary size."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any

from megajax.config.base import ConfigError
from megajax.config.checks import check_config
from megajax.config.config import Config
from megajax.config.parallel import fit_vocabulary
from megajax.data.prepare import prepare_text
from megajax.data.tokenizers import Tokenizer, build_tokenizer
from megajax.training.run_directory import RunDirectory

log = logging.getLogger(__name__)


def prepare(config: Config, run: RunDirectory) -> tuple[Config, Tokenizer]:
    """Make (once) what `data.text` asks for, load the tokenizer and give the model its vocabulary size.

    Raises:
        ConfigError: text or tokenizer cannot be used, or the tokenizer has more ids than `model.vocab_size`.
    """
    data, tokenizer_config = prepare_text(config.data, config.tokenizer, run.path)
    tokenizer = build_tokenizer(tokenizer_config)
    wanted = config.model.vocab_size
    if wanted is not None and wanted < tokenizer.vocab_size:
        raise ConfigError(
            f"model.vocab_size is {wanted} but the tokenizer has {tokenizer.vocab_size} ids: unset it, or raise it"
        )
    model = replace(config.model, vocab_size=wanted or tokenizer.vocab_size)
    model = fit_vocabulary(model, config.parallel)
    config = replace(config, data=data, tokenizer=tokenizer_config, model=model)
    check_config(config)
    return config, tokenizer


def check_tokenizer(tokenizer: Tokenizer, record: dict[str, Any], run: RunDirectory) -> None:
    """Refuse a checkpoint whose tokenizer gave other ids."""
    if record["tokenizer"] != tokenizer.identity:
        changed = [key for key, value in tokenizer.identity.items() if record["tokenizer"].get(key) != value]
        raise ConfigError(
            f"the tokenizer of {run.path} changed since its checkpoint ({', '.join(changed)}): "
            "restore the old files, or choose another output_dir"
        )


def check_order(order: str, steps: int, record: dict[str, Any], run: RunDirectory) -> None:
    """Refuse to resume where sample numbers mean other samples.

    A run that is made longer may need more epochs, and Megatron-LM's order of samples depends on their number: then the
    order changes, which is said and not refused.
    """
    if record["order"] == order:
        return
    if record["steps"] == steps:
        raise ConfigError(
            f"the training data of {run.path} changed since its checkpoint: restore it, or choose another output_dir"
        )
    log.warning(
        "train.steps was %d and is %d: the order of samples is that of the longer run, some may come twice",
        record["steps"], steps,
    )  # fmt: skip
