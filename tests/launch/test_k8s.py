"""The Kubernetes manifest is valid by models generated from JobSet's and Kubernetes' own schemas."""

from __future__ import annotations

import copy
import os
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import ValidationError

from megajax.cluster.detect import detect
from megajax.config import ClusterConfig, load_config
from tests.launch.programs import ROOT, until

api = pytest.importorskip("kubeflow_trainer_api.models", reason="pip install kubeflow-trainer-api")


@pytest.fixture
def manifest() -> Any:
    return yaml.safe_load((ROOT / "launch/k8s/jobset.yaml").read_text())


def job_of(manifest: Any) -> Any:
    return manifest["spec"]["replicatedJobs"][0]["template"]["spec"]


def container_of(manifest: Any) -> Any:
    return job_of(manifest)["template"]["spec"]["containers"][0]


def understood(manifest: Any) -> Any:
    """What the schemas know of it: a field that they do not have is left out."""
    return api.JobsetV1alpha2JobSet.from_dict(copy.deepcopy(manifest)).to_dict()


def test_it_is_a_jobset(manifest: Any):
    assert understood(manifest) == manifest
    assert (manifest["apiVersion"], manifest["kind"]) == ("jobset.x-k8s.io/v1alpha2", "JobSet")


def test_a_wrong_field_would_be_found(manifest: Any):
    for part, name in (
        (manifest["spec"], "failurePolicies"), (manifest["spec"]["network"], "subDomain"),
        (job_of(manifest), "backOffLimit"), (container_of(manifest)["resources"], "limit"),
    ):  # fmt: skip
        part[name] = {}
        assert understood(manifest) != manifest
        del part[name]
    manifest["spec"]["failurePolicy"]["maxRestarts"] = "ten"
    with pytest.raises(ValidationError, match="maxRestarts"):
        understood(manifest)


def test_its_parts_agree(manifest: Any):
    """Names, numbers and files that stand in more than one place."""
    job, container = job_of(manifest), container_of(manifest)
    environment = {entry["name"]: entry["value"] for entry in container["env"]}
    assert int(environment["JAX_NUM_PROCESSES"]) == job["parallelism"] == job["completions"]
    launch = detect(environment | {"JOB_COMPLETION_INDEX": "1"}, ClusterConfig())
    assert (launch.process, launch.processes) == (1, job["completions"])
    name, replicated = manifest["metadata"]["name"], manifest["spec"]["replicatedJobs"][0]["name"]
    host = f"{name}-{replicated}-0-0.{manifest['spec']['network']['subdomain']}"
    assert launch.coordinator == f"{host}:{container['ports'][0]['containerPort']}"
    assert container["name"] == job["podFailurePolicy"]["rules"][0]["onExitCodes"]["containerName"]
    volumes = {volume["name"] for volume in job["template"]["spec"]["volumes"]}
    assert {mount["name"] for mount in container["volumeMounts"]} == volumes
    (script,) = container["args"]
    words = script.split("megajax.train")[1].partition("&")[0].replace("\\\n", " ").split()
    config = load_config(ROOT / words[0], words[1:]).config
    assert config.train.exit_duration is None  # it would be taken for the end of the run


@pytest.mark.parametrize(
    ("python", "stop", "code"),
    [
        ("exit 0", False, 0),
        ("exit 3", False, 3),
        ("trap 'exit 0' TERM; touch ready; while :; do sleep 0.05; done", True, 143),
        ("trap 'sleep 0.3; exit 1' TERM; touch ready; while :; do sleep 0.05; done", True, 1),
    ],
)
def test_the_exit_code_of_a_pod(manifest: Any, tmp_path: Path, python: str, stop: bool, code: int):
    """Stopped and saved is not finished; a `python` of a few words stands in for the run."""
    program = tmp_path / "python"
    program.write_text(f"#!/bin/bash\ncd {tmp_path}\n[[ $2 == megajax.train ]] || exit 0\n{python}\n")
    program.chmod(0o755)
    container = container_of(manifest)
    environment = os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    process = subprocess.Popen([*container["command"], *container["args"]], env=environment)
    if stop:
        until((tmp_path / "ready").exists)
        process.send_signal(signal.SIGTERM)
    assert process.wait(20) == code
