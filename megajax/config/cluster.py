"""How several processes make one run."""

from __future__ import annotations

from pydantic import NonNegativeInt, PositiveInt

from megajax.config.base import component


@component
class ClusterConfig:
    """How the processes of a run find each other, and when one counts as lost."""

    coordinator: str | None = None
    """HOST:PORT of process 0; unset = what the launcher's environment says (SLURM, Open MPI, Kubernetes, torchrun)."""
    processes: PositiveInt | None = None
    """How many processes, together with `coordinator`."""
    process: NonNegativeInt | None = None
    """Number of this one, from 0, together with `coordinator`."""
    start_seconds: PositiveInt = 60
    """For all processes to appear and to agree on versions and configuration."""
    heartbeat_seconds: PositiveInt = 20
    """A process that was not heard of for so long is lost, and the job ends."""
    hang_seconds: PositiveInt | None = 600
    """Longest time without progress in the training loop, ten times as long for a compilation, an evaluation, a save, a
    restore or the first weights; then every stack is printed and the process ends. Unset = for ever."""
