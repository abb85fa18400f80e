"""Environments as launchers set them, and the places that are read from them."""

from __future__ import annotations

import os
import shutil
import subprocess
from importlib import import_module
from pathlib import Path

import pytest

from megajax.cluster.detect import Launch, detect, host_names
from megajax.config import ClusterConfig, InputError

SLURM = {  # srun --nodes=3 --ntasks=11, on the second node
    "SLURM_JOB_ID": "5127",
    "SLURM_STEP_ID": "0",
    "SLURM_JOB_NODELIST": "gpu[007-008,012]",
    "SLURM_STEP_NODELIST": "gpu[007-008,012]",
    "SLURM_STEP_NUM_TASKS": "11",
    "SLURM_STEP_TASKS_PER_NODE": "4(x2),3",
    "SLURM_NTASKS": "11",
    "SLURM_NODEID": "1",
    "SLURM_PROCID": "5",
    "SLURM_LOCALID": "1",
}
PART = {
    "SLURM_STEP_NODELIST": "gpu[008,012]",
    "SLURM_STEP_NUM_TASKS": "7",
    "SLURM_STEP_TASKS_PER_NODE": "4,3",
    "SLURM_TASKS_PER_NODE": "4(x2),3",
    "SLURM_PROCID": "4",
    "SLURM_LOCALID": "0",
}
BATCH_SCRIPT = {  # the shell of sbatch, before srun
    "SLURM_JOB_ID": "5127",
    "SLURM_JOB_NODELIST": "gpu[007-008]",
    "SLURM_NTASKS": "8",
    "SLURM_TASKS_PER_NODE": "4(x2)",
    "SLURM_NODEID": "0",
    "SLURM_PROCID": "0",
    "SLURM_LOCALID": "0",
}
OPEN_MPI_4 = {
    "OMPI_COMM_WORLD_SIZE": "16",
    "OMPI_COMM_WORLD_RANK": "9",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "8",
    "OMPI_MCA_orte_hnp_uri": "1531576320.0;tcp://10.96.0.1,10.148.0.1:34911",
}
OPEN_MPI_5 = {name: value for name, value in OPEN_MPI_4.items() if "orte" not in name} | {
    "PMIX_NAMESPACE": "prterun-node-01-4242@1"
}
TORCHRUN = {
    "MASTER_ADDR": "node-0.cluster",
    "MASTER_PORT": "29500",
    "WORLD_SIZE": "16",
    "RANK": "11",
    "LOCAL_RANK": "3",
    "LOCAL_WORLD_SIZE": "8",
}
JOBSET = {
    "KUBERNETES_SERVICE_HOST": "10.0.0.1",
    "JAX_COORDINATOR_ADDRESS": "gpt-workers-0-0.gpt:1234",
    "JAX_NUM_PROCESSES": "4",
    "JOB_COMPLETION_INDEX": "2",
}


def without(environ: dict[str, str], *names: str) -> dict[str, str]:
    return {name: value for name, value in environ.items() if name not in names}


def found(environ: dict[str, str], **keys: object) -> Launch:
    return detect(environ, ClusterConfig(**keys))


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({}, Launch("no launcher found")),
        # 61440 + 5127 % 4096
        (SLURM, Launch("SLURM", 11, 5, "gpu007:62471", 1, 4, 3)),
        (SLURM | {"SLURM_STEP_ID": "2"}, Launch("SLURM", 11, 5, "gpu007:62485", 1, 4, 3)),
        (SLURM | {"SLURM_STEP_NODELIST": "a3-x,b[1-2]"}, Launch("SLURM", 11, 5, "a3-x:62471", 1, 4, 3)),
        (SLURM | {"SLURM_STEP_NODELIST": "rack[2-4]n"}, Launch("SLURM", 11, 5, "rack2n:62471", 1, 4, 3)),
        (SLURM | {"SLURM_STEP_NODELIST": "a[01-02]b[1-2]"}, Launch("SLURM", 11, 5, "a01b1:62471", 1, 4, 3)),
        # srun --nodes=2 --ntasks=7 in the same job, on its last two nodes
        (SLURM | PART, Launch("SLURM", 7, 4, "gpu008:62471", 0, 3, 2)),
        (without(SLURM, "SLURM_STEP_NODELIST"), Launch("SLURM", 11, 5, "gpu007:62471", 1, 4, 3)),
        (without(SLURM | PART, "SLURM_STEP_TASKS_PER_NODE"), Launch("SLURM", 7, 4, "gpu008:62471", 0, None, None)),
        (SLURM | {"SLURM_STEP_NODELIST": "", "SLURM_NODELIST": "n[3-5]"}, Launch("SLURM", 11, 5, "n3:62471", 1, 4, 3)),
        (SLURM | {"SLURM_NODEID": "2", "SLURM_PROCID": "10"}, Launch("SLURM", 11, 10, "gpu007:62471", 1, 3, 3)),
        (SLURM | {"SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0"}, Launch("SLURM", 1, 0, None, 1, None)),
        # 1531576320 / 2^12 = 373920, of which 1184 over a multiple of 4096
        (OPEN_MPI_4, Launch("Open MPI", 16, 9, "10.96.0.1:62624", 1, 8)),
        (
            OPEN_MPI_4 | {"OMPI_MCA_orte_hnp_uri": "1531576320.0;tcp6://[fe80::b9b:ac5d,2620:10d::2]:4337"},
            Launch("Open MPI", 16, 9, "[fe80::b9b:ac5d]:62624", 1, 8),
        ),
        (OPEN_MPI_5, Launch("Open MPI", 16, 9, "node-01:61586", 1, 8)),
        (SLURM | OPEN_MPI_5, Launch("Open MPI", 16, 9, "node-01:61586", 1, 8)),
        (TORCHRUN, Launch("torchrun's variables", 16, 11, "node-0.cluster:29500", 3, 8)),
        (
            TORCHRUN | {"TORCHELASTIC_USE_AGENT_STORE": "True"},
            Launch("torchrun's variables", 16, 11, "node-0.cluster:29501", 3, 8),
        ),
        (SLURM | {"MASTER_ADDR": "gpu007", "MASTER_PORT": "1"}, Launch("SLURM", 11, 5, "gpu007:62471", 1, 4, 3)),
        (JOBSET, Launch("JAX's variables", 4, 2, "gpt-workers-0-0.gpt:1234", 0, 1)),
        (JOBSET | {"JAX_PROCESS_ID": "3"}, Launch("JAX's variables", 4, 3, "gpt-workers-0-0.gpt:1234", 0, 1)),
        (SLURM | {"JAX_COORDINATOR_ADDRESS": "ib7:99"}, Launch("SLURM", 11, 5, "ib7:99", 1, 4, 3)),
    ],
)  # fmt: skip
def test_every_launcher(environ: dict[str, str], expected: Launch):
    assert found(environ) == expected


def test_keys_come_before_any_launcher():
    launch = found(SLURM, coordinator="here:1", processes=2, process=1)
    assert launch == Launch("cluster.* keys", 2, 1, "here:1")
    assert launch.describe() == "processes: process 1 of 2, coordinator here:1 (cluster.* keys)"


@pytest.mark.parametrize("environ", [{"SLURM_JOB_ID": "5127"}, BATCH_SCRIPT], ids=["ssh into a job", "no srun"])
def test_a_part_of_a_launcher_is_one_process(environ: dict[str, str]):
    launch = found(environ)
    assert (launch.processes, launch.process, launch.coordinator) == (1, 0, None)
    assert launch.note.startswith("SLURM: SLURM_STEP_NUM_TASKS")
    assert "so this process runs alone" in launch.describe()


LOOPBACK = {"MASTER_ADDR": "127.0.0.1"}


@pytest.mark.parametrize(
    "environ",
    [TORCHRUN | LOOPBACK, TORCHRUN | {"MASTER_ADDR": "localhost"}, SLURM | {"JAX_COORDINATOR_ADDRESS": "[::1]:9"}],
)
def test_loopback_does_not_reach_another_host(environ: dict[str, str]):
    with pytest.raises(InputError, match="is every host itself: give process 0's address"):
        found(environ)


def test_loopback_on_one_host():
    assert found(TORCHRUN | LOOPBACK | {"LOCAL_WORLD_SIZE": "16"}).coordinator == "127.0.0.1:29500"


@pytest.mark.parametrize(
    ("environ", "keys", "message"),
    [
        ({}, {"coordinator": "a:1"}, "belong together: set all three"),
        ({}, {"coordinator": "a", "processes": 2, "process": 0}, "coordinator 'a' has to be HOST:PORT"),
        ({}, {"coordinator": "a:1", "processes": 2, "process": 2}, "process 2 of 2: processes are numbered from 0"),
        (TORCHRUN | {"RANK": "16"}, {}, "process 16 of 16: processes are numbered from 0"),
        (TORCHRUN | {"RANK": "-1"}, {}, "RANK='-1' in the environment is not a number"),
        (TORCHRUN | {"WORLD_SIZE": "all"}, {}, "WORLD_SIZE='all' in the environment is not a number"),
        ({"WORLD_SIZE": "2", "RANK": "0"}, {}, "nothing says where process 0 is: set JAX_COORDINATOR_ADDRESS"),
        # the hosts of the job alone, of which the step has two
        (without(SLURM | PART, "SLURM_STEP_NODELIST"), {}, "nothing says where process 0 is: set JAX_COORDINATOR"),
        (SLURM | {"SLURM_STEP_NODELIST": "gpu[7-"}, {}, r"SLURM_STEP_NODELIST='gpu\[7-' in the environment is no list"),
        (
            SLURM | {"SLURM_STEP_NODELIST": "gpu[9-7]"},
            {},
            "in the environment is no list of hosts: correct or unset it",
        ),
    ],
)
def test_contradictions_are_one_line(environ: dict[str, str], keys: dict[str, object], message: str):
    with pytest.raises(InputError, match=message) as caught:
        found(environ, **keys)
    assert "\n" not in str(caught.value)


HOST_LISTS = {
    "single": ["single"],
    "a,b-3,c": ["a", "b-3", "c"],
    "node[1-3,7]": ["node1", "node2", "node3", "node7"],
    "gpu[007-008,012]": ["gpu007", "gpu008", "gpu012"],
    "x[9-11]": ["x9", "x10", "x11"],
    "x[09-11],y[099-100]": ["x09", "x10", "x11", "y099", "y100"],
    "n[1]": ["n1"],
    "a[01-02]b[1-2]": ["a01b1", "a01b2", "a02b1", "a02b2"],
    "r[1,3]n[8-9],login,r7n[08]": ["r1n8", "r1n9", "r3n8", "r3n9", "login", "r7n08"],
    "n-a-[1-2]-[0-1],z": ["n-a-1-0", "n-a-1-1", "n-a-2-0", "n-a-2-1", "z"],
}
SUFFIXES = {
    "rack[2,4]n": ["rack2n", "rack4n"],
    "r[1-2]n[08]-ib,login": ["r1n08-ib", "r2n08-ib", "login"],
}  # which older SLURMs do not write


@pytest.mark.parametrize("text", [*HOST_LISTS, *SUFFIXES])
def test_lists_of_hosts(text: str):
    assert host_names(text) == (HOST_LISTS | SUFFIXES)[text]


@pytest.mark.parametrize("text", ["", "n[1-3", "n]1[", "n[a-b]", "a,n[3-1]", "n[]", "a,,b"])
def test_what_is_no_list_of_hosts(text: str):
    assert host_names(text) == []


@pytest.mark.skipif(shutil.which("scontrol") is None, reason="SLURM is not installed: no scontrol")
@pytest.mark.parametrize("text", HOST_LISTS)
def test_slurm_itself_expands_them_so(text: str, tmp_path: Path):
    (tmp_path / "slurm.conf").write_text("ClusterName=test\nSlurmctldHost=localhost\nNodeName=localhost CPUs=1\n")
    shown = subprocess.run(
        ["scontrol", "show", "hostnames", text],
        env=os.environ | {"SLURM_CONF": str(tmp_path / "slurm.conf")}, capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert shown.stdout.split() == host_names(text)


@pytest.mark.parametrize(
    ("module", "words", "what"),
    [
        ("generate", ["runs/any", "--prompt", "a"], "generation"),
        ("evaluate", ["runs/any", "--task", "lambada", "--data", "a"], "evaluation"),
        ("convert", ["export", "runs/any", "--out", "a"], "conversion"),
        ("verify", ["verify/gpt_tiny"], "verification"),
    ],
)
def test_what_one_process_does_is_not_done_by_several(module, words, what, monkeypatch, capsys):
    for name, value in TORCHRUN.items():
        monkeypatch.setenv(name, value)
    assert import_module(f"megajax.{module}").main(words) == 2
    assert f"error: {what} runs in one process, and this is process 11 of 16 (torchrun's" in capsys.readouterr().err
