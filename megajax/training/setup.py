"""How a run makes its configuration whole at the start: the vocabulary size of its tokenizer, the schedule so far."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from megajax.config.base import InputError
from megajax.config.checks import check_config
from megajax.config.config import Config
from megajax.config.parallel import fit_vocabulary
from megajax.data.tokenizers import Tokenizer, build_tokenizer
from megajax.training.run_directory import RunDirectory
from megajax.training.schedule import Schedule, Stretch


def fit_to_tokenizer(config: Config) -> tuple[Config, Tokenizer]:
    """Load the run's own tokenizer, and give the model the vocabulary size that it implies.

    Raises:
        InputError: the tokenizer cannot be used, or has more ids than `model.vocab_size`.
    """
    tokenizer = build_tokenizer(config.tokenizer)
    wanted = config.model.vocab_size
    if wanted is not None and wanted < tokenizer.vocab_size:
        origin, remedy = "", "unset it, or raise it"
        if config.init_from is not None:  # unset, it is that model's again
            origin = f" (that of init_from {config.init_from}, if not given beside it)"
            remedy = f"set it to {tokenizer.vocab_size} or more, or keep the tokenizer of that model"
        raise InputError(
            f"model.vocab_size is {wanted}{origin} but the tokenizer has {tokenizer.vocab_size} ids: {remedy}"
        )
    model = replace(config.model, vocab_size=wanted or tokenizer.vocab_size)
    config = replace(config, model=fit_vocabulary(model, config.parallel))
    check_config(config)
    return config, tokenizer


def check_tokenizer(tokenizer: Tokenizer, record: dict[str, Any], run: RunDirectory) -> None:
    """Refuse a checkpoint whose tokenizer gave other ids."""
    if record["tokenizer"] != tokenizer.identity:
        changed = [key for key, value in tokenizer.identity.items() if record["tokenizer"].get(key) != value]
        raise InputError(
            f"the tokenizer of {run.path} changed since its checkpoint ({', '.join(changed)}): "
            "restore the old files, or choose another output_dir"
        )


def stretches_before(record: dict[str, Any] | None) -> list[Stretch]:
    """The stretches of a run up to a checkpoint with this record; earlier versions knew one batch size alone."""
    if record is None:
        return []
    size = record["batch_size"]
    return [Stretch(*numbers) for numbers in record.get("stretches", [(0, size, size)])]


def changes(record: dict[str, Any], config: Config, samples: int, schedule: Schedule) -> list[str]:
    """Say what is different since a checkpoint was written, where it concerns which samples are read when.

    Args:
        record: of the checkpoint.
        config: as it is now.
        samples: of the whole run, as it is now.
        schedule: of the learning rate, as it is now.
    """
    size, lines, varies = config.train.global_batch_size, [], config.optim.decay_style != "constant"
    if record["batch_size"] != size:
        lines.append(
            f"global batch: {size} samples instead of {record['batch_size']}, from step {record['step'] + 1} on; "
            f"the learning rate goes on by {'steps' if config.train.steps else 'samples'} as planned"
        )
    if record["samples"] != samples:
        lines.append(f"length: {samples:,} samples instead of {record['samples']:,}")
    if varies and schedule.decay != record.get("decay", schedule.decay):
        lines.append("the learning rate decays over the new length, as optim.decay_steps or decay_samples is not set")
    return lines
