"""Detection of this process's place among the others in the environment of SLURM, Open MPI, Kubernetes or torchrun."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from itertools import product

from megajax.config.base import InputError
from megajax.config.config import ClusterConfig

Environment = Mapping[str, str]
_SLURM_HOSTS = ("SLURM_STEP_NODELIST", "SLURM_NODELIST", "SLURM_JOB_NODELIST")
"""Variables with the hosts of a step; the later ones may list the whole job, of which a step can take a part (srun
--nodes).
"""


@dataclass(frozen=True)
class Launch:
    """Place one process among those of the run."""

    source: str
    """Name of the launcher that told the place."""
    processes: int = 1
    process: int = 0
    coordinator: str | None = None
    """HOST:PORT at which process 0 is reached."""
    local_process: int = 0
    """Number of this process among those of its host."""
    local_processes: int | None = None
    """Number of processes on this host; None = unknown."""
    hosts: int | None = None
    """Number of hosts, as far as the launcher tells."""
    note: str = ""
    """Traces of a launcher that were found but not used."""

    def describe(self) -> str:
        """Return one line for the log."""
        if self.processes == 1:
            return f"processes: 1 ({self.note or self.source})"
        place = f"process {self.process} of {self.processes}, coordinator {self.coordinator}"
        if self.local_processes:
            place += f", {self.local_process} of {self.local_processes} on this host"
        return f"processes: {place} ({self.source})"


@dataclass(frozen=True)
class _Source:
    """A launcher and the variables in which it tells each value (the first that is set counts)."""

    name: str
    processes: str
    process: tuple[str, ...]
    local_process: str
    local_processes: Callable[[Environment], int | None]
    coordinator: Callable[[Environment], str | None]
    sign: str
    """Variable that shows the launcher even where the others are not set."""


def detect(environ: Environment, config: ClusterConfig) -> Launch:
    """Return this process's place, from explicit keys or else from the first launcher of the table that tells all of
    it.

    If a launcher tells only a part (an ssh session into a job, a batch script without srun), this is the only process.

    Raises:
        InputError: the values contradict each other, or lead to no address.
    """
    keys = (config.coordinator, config.processes, config.process)
    if any(key is not None for key in keys):
        if config.coordinator is None or config.processes is None or config.process is None:
            raise InputError(
                "cluster.coordinator, cluster.processes and cluster.process belong together: set all three"
            )
        return _checked(Launch("cluster.* keys", config.processes, config.process, config.coordinator))
    notes: list[str] = []
    for source in _SOURCES:
        needed = {source.processes: source.processes in environ}
        needed["/".join(source.process)] = any(name in environ for name in source.process)
        if all(needed.values()):
            return _checked(_read(source, environ))
        if source.sign in environ or any(needed.values()):
            missing = " and ".join(name for name, found in needed.items() if not found)
            notes.append(f"{source.name}: {missing} not set, so this process runs alone")
    return Launch("no launcher found", note="; ".join(notes))


def require_one_process(what: str, environ: Environment = os.environ) -> None:
    """Refuse to do `what` as one of several processes, each of which would do all of it.

    Raises:
        InputError: a launcher says that there are others.
    """
    launch = detect(environ, ClusterConfig())
    if launch.processes > 1:
        raise InputError(
            f"{what} runs in one process, and this is process {launch.process} of {launch.processes} "
            f"({launch.source}): start it once, without a launcher; it may use all devices of its host"
        )


def _read(source: _Source, environ: Environment) -> Launch:
    launch = Launch(
        source.name,
        _number(environ, source.processes),
        _number(environ, *source.process),
        environ.get("JAX_COORDINATOR_ADDRESS"),
        _number(environ, source.local_process, "0"),
        source.local_processes(environ),
    )
    if launch.processes == 1:
        return launch
    if source.name == "SLURM":
        launch = replace(launch, hosts=len(_tasks_per_node(environ)) or None)
    return replace(launch, coordinator=launch.coordinator or source.coordinator(environ))


def _checked(launch: Launch) -> Launch:
    place = f"{launch.source}: process {launch.process} of {launch.processes}"
    if not 0 <= launch.process < launch.processes:
        raise InputError(f"{place}: processes are numbered from 0 to one less than there are")
    if launch.processes == 1:
        return replace(launch, coordinator=None)
    if launch.coordinator is None:
        raise InputError(f"{place}: nothing says where process 0 is: set JAX_COORDINATOR_ADDRESS=HOST:PORT")
    host, _, port = launch.coordinator.rpartition(":")
    if not host or not port.isdigit() or not 0 < int(port) < 2**16:
        raise InputError(f"{place}: coordinator {launch.coordinator!r} has to be HOST:PORT")
    several = (launch.hosts or 1) > 1 or (launch.local_processes or launch.processes) < launch.processes
    if several and re.fullmatch(r"127\..*|localhost|\[?::1\]?", host):
        raise InputError(f"{place}: coordinator {launch.coordinator} is every host itself: give process 0's address")
    return launch


def _number(environ: Environment, *names: str) -> int:
    """Return the first of the variables that is set; a name that is a number stands for itself."""
    name = next(name for name in names if name in environ or name.isdigit())
    text = environ.get(name, name)
    if not text.isdigit():
        raise InputError(f"{name}={text!r} in the environment is not a number: correct or unset it")
    return int(text)


def _optional(name: str) -> Callable[[Environment], int | None]:
    return lambda environ: _number(environ, name) if name in environ else None


def _torchrun(environ: Environment) -> str | None:
    if "MASTER_ADDR" not in environ or "MASTER_PORT" not in environ:
        return None
    # If torchrun's own agent listens on that port, the next one is free.
    agent = environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    return f"{environ['MASTER_ADDR']}:{_number(environ, 'MASTER_PORT') + agent}"


def _open_mpi(environ: Environment) -> str | None:
    """Return mpirun's host, where process 0 is unless a rank file differs, with a port that follows from the job's
    number.
    """
    # Up to Open MPI 4: "1531576320.0;tcp://10.96.0.1,10.148.0.1:34911", from 5 on: "prterun-node01-12345@1".
    old = re.match(r"(\d+)\.\d+;(?:tcp://([^,:]+)|tcp6://\[([^,\]]+))", environ.get("OMPI_MCA_orte_hnp_uri", ""))
    new = re.match(r"prte(?:run)?-(.+)-(\d+)@", environ.get("PMIX_NAMESPACE", ""))
    if old:
        return f"{old[2] or f'[{old[3]}]'}:{_port(int(old[1]) >> 12)}"
    return f"{new[1]}:{_port(int(new[2]))}" if new else None


def _slurm(environ: Environment) -> str | None:
    """Return the step's first node, with a port that follows from the step's number."""
    name = next((name for name in _SLURM_HOSTS if environ.get(name)), None)
    if name is None or "SLURM_JOB_ID" not in environ:
        return None
    hosts, tasks = host_names(environ[name]), _tasks_per_node(environ)
    if not hosts:
        raise InputError(f"{name}={environ[name]!r} in the environment is no list of hosts: correct or unset it")
    if name != _SLURM_HOSTS[0] and len(tasks) != len(hosts):
        return None  # these may be the hosts of a larger job, and nothing tells which are the step's
    port = _port(_number(environ, "SLURM_JOB_ID") + 7 * _number(environ, "SLURM_STEP_ID", "0"))
    return f"{hosts[0]}:{port}"


def host_names(text: str) -> list[str]:
    """Expand a list of hosts in SLURM's notation: `a[01-02,7]b[1-2],c` -> a01b1, a01b2, a02b1, ..., a7b2, c.

    Numbers keep their leading zeros, and the last bracket varies fastest. The result is empty if the text is not such a
    list.
    """
    span = r"\d+(?:-\d+)?"
    name = rf"(?:[^\[\],\s]|\[{span}(?:,{span})*\])+"
    if not re.fullmatch(rf"{name}(?:,{name})*", text):
        return []
    expanded = [[*product(*map(_expand, re.split(r"(\[.*?\])", part)))] for part in re.findall(name, text)]
    return ["".join(pieces) for part in expanded for pieces in part] if all(expanded) else []


def _expand(piece: str) -> list[str]:
    """Expand a bracket: `[08-10,12]` -> 08, 09, 10, 12; a piece between brackets stands for itself."""
    if not piece.startswith("["):
        return [piece]
    spans = [span.partition("-") for span in piece[1:-1].split(",")]
    return [f"{n:0{len(first)}}" for first, _, last in spans for n in range(int(first), int(last or first) + 1)]


def _slurm_local(environ: Environment) -> int | None:
    tasks, node = _tasks_per_node(environ), _number(environ, "SLURM_NODEID", "0")
    return tasks[node] if node < len(tasks) else None


def _tasks_per_node(environ: Environment) -> list[int]:
    """List the tasks of every node of the step: `4(x2),3` -> 4, 4, 3; or return nothing if the list is that of a larger
    job.
    """
    text = environ.get("SLURM_STEP_TASKS_PER_NODE", environ.get("SLURM_TASKS_PER_NODE", ""))
    counts = re.findall(r"(\d+)(?:\(x(\d+)\))?", text)
    tasks = [int(count) for count, times in counts for _ in range(int(times or 1))]
    return tasks if sum(tasks) == _number(environ, "SLURM_STEP_NUM_TASKS") else []


def _port(job: int) -> int:
    """Return one of the 4,096 highest ports, which Linux does not assign by itself."""
    return 2**16 - 2**12 + job % 2**12


# The order matters: SLURM starts mpirun and torchrun, once per host, and its variables remain set. SLURM_NTASKS would
# not do as a sign: a batch script has it too, before srun starts anything.
_SOURCES = (
    _Source(
        name="JAX's variables",
        processes="JAX_NUM_PROCESSES",
        process=(
            "JAX_PROCESS_ID",
            "JOB_COMPLETION_INDEX",
        ),  # the second numbers the pods of Kubernetes' Indexed Job
        local_process="0",  # JAX_LOCAL_DEVICE_IDS tells a process's own devices
        local_processes=lambda environ: 1 if "JOB_COMPLETION_INDEX" in environ else None,
        coordinator=lambda environ: None,  # JAX_COORDINATOR_ADDRESS, which helps out with any launcher
        sign="JAX_COORDINATOR_ADDRESS",
    ),
    _Source(
        name="torchrun's variables",
        processes="WORLD_SIZE",
        process=("RANK",),
        local_process="LOCAL_RANK",
        local_processes=_optional("LOCAL_WORLD_SIZE"),
        coordinator=_torchrun,
        sign="MASTER_ADDR",
    ),
    _Source(
        name="Open MPI",
        processes="OMPI_COMM_WORLD_SIZE",
        process=("OMPI_COMM_WORLD_RANK",),
        local_process="OMPI_COMM_WORLD_LOCAL_RANK",
        local_processes=_optional("OMPI_COMM_WORLD_LOCAL_SIZE"),
        coordinator=_open_mpi,
        sign="OMPI_COMM_WORLD_SIZE",
    ),
    _Source(
        name="SLURM",
        processes="SLURM_STEP_NUM_TASKS",
        process=("SLURM_PROCID",),
        local_process="SLURM_LOCALID",
        local_processes=_slurm_local,
        coordinator=_slurm,
        sign="SLURM_JOB_ID",
    ),
)
