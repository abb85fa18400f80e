"""The SLURM script runs on a real SLURM: a cluster of one node, which is started for these tests and stopped after
them.

Debian has it in three packages: apt-get install slurmctld slurmd slurm-client
"""

from __future__ import annotations

import getpass
import os
import re
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.launch.programs import ROOT, tiny_run, until

PROGRAMS = ("slurmctld", "slurmd", "sbatch", "srun", "scancel", "sinfo", "scontrol")
PATH = f"{os.environ['PATH']}:/usr/sbin"
MISSING = [name for name in PROGRAMS if shutil.which(name, path=PATH) is None]
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(bool(MISSING), reason=f"SLURM is not installed: no {', '.join(MISSING)}"),
]

# No accounting, cgroups, munge or network beyond the loopback; the same user for everything.
CONFIGURATION = """
ClusterName=test
SlurmctldHost=localhost
SlurmctldPort={control_port}
SlurmdPort={node_port}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/none
CredType=cred/none
StateSaveLocation={directory}/state
SlurmdSpoolDir={directory}/spool
SlurmctldPidFile={directory}/slurmctld.pid
SlurmdPidFile={directory}/slurmd.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
JobAcctGatherType=jobacct_gather/none
SchedulerType=sched/builtin
SelectType=select/cons_tres
SlurmdParameters=config_overrides
KillWait=5
NodeName=localhost CPUs=2 State=UNKNOWN
PartitionName=all Nodes=ALL Default=YES State=UP
"""


class Cluster:
    """SLURM on this machine."""

    def __init__(self, directory: Path) -> None:
        """Start it in an empty directory."""
        for name in ("state", "spool"):
            (directory / name).mkdir()
        ports = [socket.create_server(("localhost", 0)) for _ in range(2)]
        control_port, node_port = (port.getsockname()[1] for port in ports)
        for port in ports:
            port.close()
        text = CONFIGURATION.format(
            directory=directory, control_port=control_port, node_port=node_port, user=getpass.getuser()
        )
        (directory / "slurm.conf").write_text(text)
        self.environment = os.environ | {
            "PATH": PATH, "SLURM_CONF": str(directory / "slurm.conf"), "PYTHON": sys.executable,
            "PYTHONPATH": str(ROOT),
        }  # fmt: skip
        self.daemons = []
        for name in ("slurmctld", "slurmd"):
            with (directory / f"{name}.log").open("w") as log:
                daemon = subprocess.Popen([name, "-D"], env=self.environment, stdout=log, stderr=log)
            self.daemons.append(daemon)
        until(lambda: "idle" in self.run("sinfo", "--noheader", "--format=%T"))

    def run(self, *command: str, **variables: str) -> str:
        """What a command prints."""
        environment = self.environment | variables
        return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False).stdout

    def submit(self, log: Path, *words: str, **variables: str) -> str:
        """Submit the script for two tasks on the one node, which has no GPU; the number of the job."""
        shape = ["--nodes=1", "--ntasks-per-node=2", "--gpus-per-node=0", "--parsable", f"--output={log}"]
        variables = {"SUPERVISOR": "--max-restarts 3 --backoff 0.1", "SLURM_WAIT": "2"} | variables
        return self.run("sbatch", *shape, "launch/slurm/train.sbatch", *words, **variables).strip()

    def finish(self, job: str, log: Path) -> tuple[int, str]:
        """Exit code of a job when it has ended, and its log."""

        def ended() -> re.Match[str] | None:
            return re.search(r"JobState=(?!PENDING|RUNNING|COMPLETING).*ExitCode=(\d+):", self.show(job), re.DOTALL)

        until(ended, 100)
        found = ended()
        assert found is not None
        return int(found[1]), log.read_text()

    def show(self, job: str) -> str:
        """All that SLURM says about a job."""
        return self.run("scontrol", "show", "job", job)

    def stop(self) -> None:
        """End it, jobs first."""
        self.run("scancel", "--full", f"--user={getpass.getuser()}")
        time.sleep(0.5)
        for daemon in self.daemons:
            daemon.terminate()
        for daemon in self.daemons:
            try:
                daemon.wait(10)
            except subprocess.TimeoutExpired:
                daemon.kill()


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    running = Cluster(tmp_path_factory.mktemp("slurm"))
    try:
        yield running
    finally:
        running.stop()


def program(tmp_path: Path, code: str) -> str:
    """A stand-in for training, as the COMMAND of the script; knows its `task` and which `start` of the job this is."""
    path = tmp_path / "program.py"
    path.write_text(
        "import os, signal, sys, time\ntask = int(os.environ['SLURM_PROCID'])\n"
        "start = int(os.environ['SLURM_STEP_ID'])\n" + code
    )
    return f"{sys.executable} {path}"


def test_two_tasks(cluster: Cluster, tmp_path: Path):
    """Both get the words of the command line; their lines are labelled."""
    log = tmp_path / "log"
    code, text = cluster.finish(
        cluster.submit(log, "a.yaml", "b.c=1 2", COMMAND=program(tmp_path, "print(task, sys.argv[1:])")), log
    )
    assert code == 0, text
    assert "start 1: 2 task(s) on localhost" in text
    assert sorted(re.findall(r"^\d: .*", text, re.MULTILINE)) == [
        "0: 0 ['a.yaml', 'b.c=1 2']", "1: 1 ['a.yaml', 'b.c=1 2']"
    ]  # fmt: skip


def test_a_crash_takes_the_others_along_and_is_restarted(cluster: Cluster, tmp_path: Path):
    """Nobody waits for a task that is gone."""
    crash = "if start == 0:\n    os.kill(os.getpid(), signal.SIGKILL) if task else time.sleep(60)\nprint('fine')"
    before, log = time.monotonic(), tmp_path / "log"
    code, text = cluster.finish(cluster.submit(log, COMMAND=program(tmp_path, crash)), log)
    assert code == 0, text
    assert time.monotonic() - before < 50
    assert "start 2 of at most 4" in text
    assert text.count("fine") == 2


def test_diverged_is_not_restarted(cluster: Cluster, tmp_path: Path):
    """The exit code of the tasks is that of the job, though one of them is slower."""
    log = tmp_path / "log"
    command = program(tmp_path, "time.sleep(task)\nsys.exit(3)")
    code, text = cluster.finish(cluster.submit(log, COMMAND=command), log)
    assert code == 3, text
    assert "start 2" not in text


def test_sigterm_saves_and_ends(cluster: Cluster, tmp_path: Path):
    """The signal before the time limit goes to the tasks, not to the script."""
    wait = (
        "signal.signal(signal.SIGTERM, lambda *_: (print('saved'), sys.exit(0)))\n"
        f"open(f'{tmp_path}/ready{{task}}', 'w').close()\ntime.sleep(60)"
    )
    log = tmp_path / "log"
    job = cluster.submit(log, COMMAND=program(tmp_path, wait))
    until(lambda: len(list(tmp_path.glob("ready*"))) == 2)
    cluster.run("scancel", "--signal=TERM", job)
    code, text = cluster.finish(job, log)
    assert code == 0, text
    assert text.count("saved") == 2
    assert "start 2" not in text


def test_a_real_run_on_two_tasks(cluster: Cluster, tmp_path: Path):
    """The two tasks find each other through SLURM's variables, and are one run."""
    words = tiny_run(tmp_path, "train.steps=20", "parallel.simulate_devices=1")
    log = tmp_path / "log"
    code, text = cluster.finish(cluster.submit(log, *words, SLURM_WAIT="60"), log)
    assert code == 0, text
    assert "process 0 of 2" in text
    assert "mesh: data 2" in text
    assert text.count("finished 20 steps") == 1
    assert (tmp_path / "run/checkpoints/20").is_dir()
