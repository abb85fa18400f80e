"""`python -m megajax.replay RUN_DIR [--step N] [KEY=VALUE ...]`: take steps of a run again and compare every bit.

The steps from the newest checkpoint before N are taken twice. Loss and gradient norm of each step are compared with
what the run recorded, and the state after step N with that of the other pass and of the run's own checkpoint, if it
kept one. A difference is a fault of a device, a kernel that is not deterministic (`train.deterministic`), or other
software than the run had. Other layouts give other bits: replay on the devices of the run, under a launcher if it had
one, and name the keys that were not those of its first start, such as a mesh of fewer hosts. The batch size is the
recorded one; where the run had other sources or another length by then, replaying without them is refused.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass, field, replace
from math import isfinite
from pathlib import Path
from typing import Any

from megajax.checkpoint.fingerprint import fingerprint
from megajax.checkpoint.store import Checkpoints
from megajax.config import Config, InputError, check_config
from megajax.config.cli import OneLineParser, entry_point
from megajax.config.yaml_text import yaml_text
from megajax.data.consumed import Mix, same_sources
from megajax.observe.goodput import Clock
from megajax.train import Trainer, join_cluster
from megajax.training.batch_size import BatchSizeRamp
from megajax.training.run_directory import RunDirectory
from megajax.training.schedule import Schedule

Metrics = dict[str, float | None]
"""Metrics of a step by name. A number that is not finite is None, as in metrics.jsonl."""
COMPARED = ("lm loss", "grad-norm", "learning-rate", "tokens")


@entry_point
def main(argv: list[str]) -> int:
    """Run the command line and return 1 if some bit differs."""
    parser = OneLineParser(
        prog="python -m megajax.replay", description="Take steps of a run again and compare every bit."
    )
    parser.add_argument("run_dir", metavar="RUN_DIR", help="directory of the run, which is its output_dir")
    parser.add_argument(
        "--step", type=int, metavar="N", help="last step to replay (default: that of the newest checkpoint)"
    )
    parser.add_argument(
        "words", nargs="*", metavar="KEY=VALUE", help="values that differ from those of the run's first start"
    )
    options = parser.parse_intermixed_args(argv)
    run, config = RunDirectory.open(options.run_dir, options.words)
    cluster = join_cluster(config)
    with cluster.guard():
        with Checkpoints(run.checkpoints(config.checkpoint), None, run.owner) as checkpoints, cluster.guard():
            start, stop = choose_steps(checkpoints, options.step)
            recorded = recorded_metrics(run.path / "metrics.jsonl", start, stop)
            config = with_recorded_batches(config, recorded, checkpoints.record(start)["consumed_samples"], start, stop)
            trainer = Trainer(config, run, checkpoints, cluster, Clock(), start)
            record = checkpoints.record(stop) if stop in checkpoints.steps else None
            if record:
                check_as_then(record, trainer.dataset.mix, trainer.schedule)
            passes = [take_steps(trainer, start, stop) for _ in range(2)]
            kept = record["fingerprint"] if record else None
        differences = compare(passes, recorded, kept)
        for difference in differences:
            trainer.say(f"differs: {difference}")
        size = f", {config.train.global_batch_size} samples each" if config.train.rampup is None else ""
        what = "both passes, the run's metrics" + (" and its checkpoint" if kept else "")
        trainer.say(f"steps {start + 1} to {stop}{size}: {what} {'DISAGREE' if differences else 'agree in every bit'}")
        return int(bool(differences))


@dataclass
class Pass:
    """The results of taking the steps once."""

    metrics: dict[int, Metrics] = field(default_factory=dict)
    """Metrics of every step, by its number."""
    fingerprints: dict[str, str] = field(default_factory=dict)
    """Fingerprints of the state after the last step, by name of the array."""


def choose_steps(checkpoints: Checkpoints, last: int | None) -> tuple[int, int]:
    """Return the step of the checkpoint to start from, and the last step.

    Raises:
        InputError: there is no checkpoint before that step.
    """
    last = last or max(checkpoints.steps, default=0)
    start = max((step for step in checkpoints.steps if step < last), default=None)
    if start is None:
        oldest, newest = min(checkpoints.steps, default=None), max(checkpoints.steps, default=None)
        remedy = "train it first"
        if oldest is not None:
            remedy = f"choose a --step from {oldest + 1} on"
        if oldest == newest == last:
            remedy = f"nothing after step {last} is saved, so train on, or save more often (checkpoint.every)"
        found = ", ".join(map(str, checkpoints.steps)) or "none"
        raise InputError(f"{checkpoints.directory} has no checkpoint before step {last} ({found}): {remedy}")
    return start, last


def with_recorded_batches(config: Config, recorded: dict[int, Metrics], consumed: int, start: int, stop: int) -> Config:
    """Return the configuration with the batch size that the steps after `start`, up to `stop`, had.

    Args:
        config: configuration of the first start of the run, with what the user has changed.
        recorded: metrics that the run recorded, by step.
        consumed: number of samples that were consumed up to `start`.
        start: step of the checkpoint from which the steps are taken.
        stop: number of the last step.

    Raises:
        InputError: these steps had several batch sizes, and not by the configuration's ramp.
    """
    taken = {step: int(recorded[step]["batch-size"] or 0) for step in range(start + 1, stop + 1) if step in recorded}
    size = taken.get(start + 1, config.train.global_batch_size)
    if config.train.rampup is None and size != config.train.global_batch_size:
        config = replace(config, train=replace(config.train, global_batch_size=size))
        check_config(config)
    ramp = BatchSizeRamp.from_config(config.train)
    for step in range(start + 1, stop + 1):
        size = ramp.batch_size_at(consumed)
        if taken.get(step, size) != size:
            remedy = "give train.rampup and train.global_batch_size as they were then"
            if config.train.rampup is None:
                remedy = f"choose a --step up to {step - 1}, as the checkpoint at which it changed is gone"
            raise InputError(f"step {step} had {taken[step]} samples, where the run goes on with {size}: {remedy}")
        consumed += size
    return config


def check_as_then(record: dict[str, Any], mix: Mix, schedule: Schedule) -> None:
    """Refuse to replay if other samples would be read, or other learning rates used, than in the run.

    Args:
        record: record of the checkpoint of the last step.
        mix: sources that would be read.
        schedule: schedule of the learning rate that would be used.

    Raises:
        InputError: sources or schedule differ; the message names the keys, and what they were.
    """
    then = Mix.from_record(record["data"])
    if then.start != mix.start or not same_sources(then.sources, mix.sources):
        words = [word for source in then.sources for word in (source.weight, source.prefix) if word is not None]
        raise InputError(
            f"the run read another mix of sources at step {record['step']}: give data.path (or data.train_path) as it "
            f"was then, {yaml_text(words)}"
        )
    if schedule.style != "constant" and record.get("decay", schedule.decay) != schedule.decay:
        raise InputError(
            f"the learning rate of step {record['step']} decayed over {record['decay']:,} samples, and now over "
            f"{schedule.decay:,}: give train.steps or train.samples as it was then"
        )


def take_steps(trainer: Trainer, start: int, stop: int) -> Pass:
    """Take the steps after `start`, up to `stop`, from the checkpoint of `start`."""
    del trainer.state  # there may not be room for two
    record = trainer.restore(start)
    trainer.step, trainer.consumed = start, record["consumed_samples"]
    done = Pass()
    for consumed, host_batch in trainer.batches():
        metrics = trainer.take_step(consumed, host_batch)
        values = {name: float(metrics[name]) for name in COMPARED}
        done.metrics[trainer.step] = {name: value if isfinite(value) else None for name, value in values.items()}
        if trainer.step == stop:
            break
    if trainer.step < stop:
        raise InputError(
            f"{trainer.run.path} has {trainer.steps} steps: choose a --step up to that, or raise train.steps"
        )
    done.fingerprints = fingerprint(trainer.canonical.of(trainer.state))
    return done


def recorded_metrics(path: Path, start: int, stop: int) -> dict[int, Metrics]:
    """Return the metrics that the run recorded, by step.

    Raises:
        InputError: the run went back to a checkpoint between the two steps, so that it did not take them in turn.
    """
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    records = {record["step"]: record for record in map(json.loads, lines) if "lm loss" in record}
    for step in range(start + 1, min(stop, max(records, default=0)) + 1):
        if step not in records:
            raise InputError(f"step {step} was left out when the run went back to a checkpoint: choose another --step")
    return records


def compare(passes: list[Pass], recorded: dict[int, Metrics], kept: dict[str, str] | None) -> list[str]:
    """List every difference between the passes, the recorded metrics and the kept fingerprints."""
    first, second = passes
    found = []
    for step, metrics in first.metrics.items():
        for name, value in metrics.items():
            others = {"the other pass": second.metrics[step][name]}
            if step in recorded:
                others["the run"] = recorded[step][name]
            found += [f"step {step} {name}: {value!r}, in {who} {x!r}" for who, x in others.items() if x != value]
    for name, digits in first.fingerprints.items():
        if digits != second.fingerprints[name]:
            found.append(f"{name} after the last step, in the other pass")
        if kept is not None and digits != kept[name]:
            found.append(f"{name} after the last step, in the run's checkpoint")
    return found


if __name__ == "__main__":
    sys.exit(main())
