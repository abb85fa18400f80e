"""`python -m megajax.replay RUN_DIR [--step N]`: take steps of a run again, from a checkpoint, and compare every bit.

The steps from the newest checkpoint before N are taken twice. Loss and gradient norm of each are held against what the
run recorded, and the state after step N against that of the other pass and of the run's own checkpoint, if it kept one.
A difference is a fault of a device, a kernel that is not deterministic (`train.deterministic`), or other software than
the run had. Under a launcher all processes replay together, as they trained.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass, field
from pathlib import Path

from megajax.checkpoint.fingerprint import fingerprint
from megajax.checkpoint.store import Checkpoints
from megajax.config import ConfigError
from megajax.config.cli import OneLineParser, entry_point
from megajax.observe.clock import Clock
from megajax.train import Trainer, join_cluster
from megajax.training.run_directory import RunDirectory

COMPARED = ("lm loss", "grad-norm", "learning-rate", "tokens")


@entry_point
def main(argv: list[str]) -> int:
    """The command line; 1 if some bit differs."""
    parser = OneLineParser(prog="python -m megajax.replay", description="Take steps of a run again and compare.")
    parser.add_argument("run_dir", metavar="RUN_DIR", help="output_dir of the training")
    parser.add_argument("--step", type=int, metavar="N", help="last step (default: that of the newest checkpoint)")
    options = parser.parse_args(argv)
    run, config = RunDirectory.open(options.run_dir)
    cluster = join_cluster(config)
    with cluster.guard():
        with Checkpoints(run.checkpoints(config.checkpoint), None) as checkpoints, cluster.guard():
            start, stop = choose_steps(checkpoints, options.step)
            trainer = Trainer(config, run, checkpoints, cluster, Clock(), start)
            passes = [take_steps(trainer, start, stop) for _ in range(2)]
            kept = checkpoints.record(stop)["fingerprint"] if stop in checkpoints.steps else None
        differences = compare(passes, recorded_metrics(run.path / "metrics.jsonl"), kept)
        for difference in differences:
            trainer.say(f"differs: {difference}")
        what = "both passes, the run's metrics" + (" and its checkpoint" if kept else "")
        trainer.say(f"steps {start + 1} to {stop}: {what} {'DISAGREE' if differences else 'agree in every bit'}")
        return int(bool(differences))


@dataclass
class Pass:
    """What came out of taking the steps once."""

    metrics: dict[int, dict[str, float]] = field(default_factory=dict)
    """By step."""
    fingerprints: dict[str, str] = field(default_factory=dict)
    """Of the state after the last one, by name."""


def choose_steps(checkpoints: Checkpoints, last: int | None) -> tuple[int, int]:
    """The checkpoint to start from, and the last step.

    Raises:
        ConfigError: there is no checkpoint before that step.
    """
    last = last or max(checkpoints.steps, default=0)
    start = max((step for step in checkpoints.steps if step < last), default=None)
    if start is None:
        found = ", ".join(map(str, checkpoints.steps)) or "none"
        raise ConfigError(
            f"{checkpoints.directory} has no checkpoint before step {last} ({found}): choose another --step"
        )
    return start, last


def take_steps(trainer: Trainer, start: int, stop: int) -> Pass:
    """Take the steps after `start`, up to `stop`, from the checkpoint of `start`."""
    record = trainer.restore(start)
    trainer.step, trainer.consumed = start, record["consumed_samples"]
    done = Pass()
    for consumed, host_batch in trainer.batches():
        metrics = trainer.take_step(consumed, host_batch)
        done.metrics[trainer.step] = {name: float(metrics[name]) for name in COMPARED}
        if trainer.step == stop:
            break
    done.fingerprints = fingerprint(trainer.canonical.of(trainer.state))
    return done


def recorded_metrics(path: Path) -> dict[int, dict[str, float]]:
    """What the run recorded, by step."""
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    records = [json.loads(line) for line in lines]
    return {record["step"]: record for record in records if "lm loss" in record}


def compare(passes: list[Pass], recorded: dict[int, dict[str, float]], kept: dict[str, str] | None) -> list[str]:
    """Everything that is not equal, by step or name."""
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
