"""Noticing that a run has gone wrong, one step after it did (metrics are read one step late)."""

from __future__ import annotations

import logging
import math

from megajax.config.config import Config
from megajax.observe.late import StepMetrics
from megajax.training.loss_scale import check_loss_scale

log = logging.getLogger(__name__)


def check_step(done: StepMetrics | None, config: Config, last_checkpoint: int | None) -> None:
    """Look at a finished step's metrics.

    A step that is not finite was skipped on the device, so the state is still that of the step before.

    Raises:
        FloatingPointError: loss or gradient is not finite (fp16: for too many steps at the smallest loss scale).
    """
    if done is None or not done.scalars["skipped"]:
        return
    if done.scalars["tokens"] == 0:
        log.warning("step %d has no unmasked token: skipped, nothing was learned from it", done.step)
        return
    if config.train.precision == "fp16":
        check_loss_scale(int(done.scalars["skips-at-minimum"]), config.loss_scale)
        return
    loss, norm = done.scalars["lm loss"], done.scalars["grad-norm"]
    name, value = ("loss", loss) if not math.isfinite(loss) else ("gradient norm", norm)
    saved = (
        "none was saved" if last_checkpoint is None else f"step {last_checkpoint} in {config.output_dir}/checkpoints"
    )
    raise FloatingPointError(
        f"the {name} is {value} at step {done.step}, learning rate {done.scalars['learning-rate']:g}; last good "
        f"checkpoint: {saved}; lower optim.lr, lengthen the warm-up, or look at the data of that step"
    )
