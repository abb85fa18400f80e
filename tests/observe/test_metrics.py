"""Metrics files have complete lines and deterministic contents, and continue seamlessly after a resume."""

import importlib.util
import json
import socket
import struct
import sys
from urllib.request import urlopen

import pytest
from tensorboardX.proto.event_pb2 import Event

from megajax.config.base import InputError
from megajax.config.config import LogConfig
from megajax.observe.metrics import JsonlWriter, TensorBoardWriter, open_writers


def write_steps(writer, steps, seconds=0.1):
    for step in steps:
        writer.write(step, 8 * step, {"lm loss": 10.0 / step}, {"iteration-time": seconds * step})
    writer.close()


def without_timing(path):
    return [{k: v for k, v in json.loads(line).items() if k != "timing"} for line in path.read_text().splitlines()]


def read_events(directory):
    """Every event of a TensorBoard directory: records of length, CRC, protocol buffer, CRC."""
    events = []
    for path in sorted(directory.iterdir()):
        data = path.read_bytes()
        while data:
            (length,) = struct.unpack("<Q", data[:8])
            events.append(Event.FromString(data[12 : 12 + length]))
            data = data[16 + length :]
    return events


def test_one_object_per_line(tmp_path):
    writer = JsonlWriter(tmp_path / "run" / "metrics.jsonl", resumed_step=0)
    writer.write(1, 8, {"lm loss": 2.5, "grad-norm": float("inf")}, {"iteration-time": 0.5})
    # Complete on disk before the file is closed: a killed run keeps its record.
    assert (tmp_path / "run" / "metrics.jsonl").read_text() == (
        '{"step": 1, "samples": 8, "lm loss": 2.5, "grad-norm": null, "timing": {"iteration-time": 0.5}}\n'
    )
    writer.close()


def test_resumed_file_equals_an_uninterrupted_one(tmp_path):
    """Checkpoint at step 3, crash in step 6 while writing its line, resume at 4."""
    whole, broken = tmp_path / "whole.jsonl", tmp_path / "broken.jsonl"
    write_steps(JsonlWriter(whole, resumed_step=0), range(1, 9))

    write_steps(JsonlWriter(broken, resumed_step=0), range(1, 6), seconds=0.2)
    with broken.open("a") as file:
        file.write('{"step": 6, "sam')
    write_steps(JsonlWriter(broken, resumed_step=3), range(4, 9), seconds=0.3)

    assert without_timing(broken) == without_timing(whole)
    assert [path.name for path in sorted(tmp_path.iterdir())] == ["broken.jsonl", "whole.jsonl"]


def test_a_new_run_starts_an_empty_file(tmp_path):
    path = tmp_path / "metrics.jsonl"
    write_steps(JsonlWriter(path, resumed_step=0), [1, 2, 3])
    write_steps(JsonlWriter(path, resumed_step=0), [1])
    assert [record["step"] for record in without_timing(path)] == [1]


@pytest.mark.parametrize("line", ["not json", "[1]", '{"loss": 1}'])
def test_a_file_that_is_no_metrics_file_is_left_alone(tmp_path, line):
    path = tmp_path / "metrics.jsonl"
    path.write_text(f'{{"step": 1}}\n{line}\n')
    with pytest.raises(InputError, match=r"metrics.jsonl, line 2 is not a metrics record: move the file away"):
        JsonlWriter(path, resumed_step=1)
    assert path.read_text().endswith(f"{line}\n")


def test_tensorboard_scalars(tmp_path):
    write_steps(TensorBoardWriter(tmp_path, resumed_step=0), [1, 2])
    scalars = [(e.step, v.tag, v.simple_value) for e in read_events(tmp_path) for v in e.summary.value]
    assert [(step, tag) for step, tag, _ in scalars] == [
        (1, "lm loss"),
        (1, "iteration-time"),
        (2, "lm loss"),
        (2, "iteration-time"),
    ]
    assert scalars[2][2] == 5.0


def test_tensorboard_hides_what_a_resume_repeats(tmp_path):
    write_steps(TensorBoardWriter(tmp_path, resumed_step=3), [4])
    starts = [event.step for event in read_events(tmp_path) if event.session_log.status]
    assert starts == [4]


def test_writers_follow_the_configuration(tmp_path):
    for tensorboard, names in ((True, ["metrics.jsonl", "tensorboard"]), (False, ["metrics.jsonl"])):
        directory = tmp_path / str(tensorboard)
        with open_writers(LogConfig(tensorboard=tensorboard), directory, resumed_step=0) as writers:
            for writer in writers:
                writer.write(1, 8, {"lm loss": 2.0}, {})
        assert sorted(path.name for path in directory.iterdir()) == names


@pytest.mark.skipif(importlib.util.find_spec("wandb") is not None, reason="wandb is installed")
def test_missing_wandb_is_said_before_anything_is_written(tmp_path):
    with pytest.raises(InputError, match=r"wandb is not installed: pip install 'megajax\[wandb\]'"):
        open_writers(LogConfig(wandb_project="demo"), tmp_path, resumed_step=0).__enter__()
    assert not list(tmp_path.iterdir())


def free_port():
    with socket.socket() as probe:
        probe.bind(("", 0))
        return probe.getsockname()[1]


def test_prometheus_scrapes_the_newest_values(tmp_path):
    port = free_port()
    config = LogConfig(tensorboard=False, prometheus_port=port)
    for _ in range(2):  # the port is free again when a run ends
        with open_writers(config, tmp_path, resumed_step=0) as writers:
            for step in (1, 2):
                for writer in writers:
                    writer.write(step, 8 * step, {"lm loss": 10.0 / step}, {"iteration-time-p50": 0.25})
            with urlopen(f"http://localhost:{port}/metrics") as reply:
                text = reply.read().decode()
        values = dict(line.split() for line in text.splitlines() if not line.startswith("#"))
        assert {name: float(value) for name, value in values.items()} == {
            "megajax_step": 2.0,
            "megajax_samples": 16.0,
            "megajax_lm_loss": 5.0,
            "megajax_iteration_time_p50": 0.25,
        }
    assert (tmp_path / "metrics.jsonl").exists()


def test_a_port_in_use_is_said_before_anything_is_written(tmp_path):
    with socket.create_server(("", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(
            InputError, match=rf"log.prometheus_port {port} cannot be served \(Address already in use\)"
        ):
            open_writers(LogConfig(prometheus_port=port), tmp_path, resumed_step=0).__enter__()
    assert not list(tmp_path.iterdir())


def test_no_such_port(tmp_path):
    with pytest.raises(InputError, match=r"log.prometheus_port 70000 cannot be served"):
        open_writers(LogConfig(prometheus_port=70_000), tmp_path, resumed_step=0).__enter__()


def test_missing_prometheus_client(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "prometheus_client", None)  # as if it were not installed
    with pytest.raises(InputError, match=r"prometheus_client is not installed: pip install 'megajax\[prometheus\]'"):
        open_writers(LogConfig(prometheus_port=9090), tmp_path, resumed_step=0).__enter__()
