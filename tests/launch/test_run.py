"""The supervisor restarts a job, with the right number of processes, or leaves it ended.

The jobs are stand-ins that count their starts in a file; their command line names a real configuration.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from launch.run import Run
from tests.interop.hf.made import MODELS, made
from tests.launch.programs import ROOT, finish, launch, python, tiny_run, until

CONFIG = ["megajax.train", "configs/models/gpt2_124m.yaml", "train.global_batch_size=12", "parallel.fsdp=2"]


def job(tmp_path: Path, code: str, *words: str) -> list[str]:
    """A program that knows how often it was `starts`-ed, can `save(step)`, and notes how many processes there are."""
    help = (
        f"log = '{tmp_path}/starts'\n"
        "if rank == 0: open(log, 'a').write(os.environ.get('WORLD_SIZE', '1') + '\\n')\n"
        "starts = len(open(log).readlines()) if rank == 0 else 0\n"
        f"save = lambda step: os.makedirs(f'{tmp_path}/run/checkpoints/{{step}}')\n"
    )
    return [*python(help + code), *CONFIG, f"output_dir={tmp_path}/run", *words]


def starts(tmp_path: Path) -> list[int]:
    """Number of processes of every start."""
    return [int(line) for line in (tmp_path / "starts").read_text().split()]


def lines(err: str) -> list[str]:
    """The supervisor's own, without their dates."""
    return [line.partition("launch.run: ")[2] for line in err.splitlines() if "launch.run: " in line]


def test_a_crash_is_restarted_from_the_newest_checkpoint(tmp_path: Path):
    code = "if starts < 3: save(10 * starts); os.kill(os.getpid(), signal.SIGKILL)"
    returned, _, err = finish(launch("run", "--max-restarts", "5", "--backoff", "0.1", *job(tmp_path, code)))
    assert returned == 0, err
    assert lines(err) == [
        "start 1 of at most 6: 1 process(es), no checkpoint",
        "ended with exit code 137 (SIGKILL), newest checkpoint: step 10: restart in 0.1 s",
        "start 2 of at most 6: 1 process(es), newest checkpoint: step 10",
        "ended with exit code 137 (SIGKILL), newest checkpoint: step 20: restart in 0.1 s",
        "start 3 of at most 6: 1 process(es), newest checkpoint: step 20",
        "ended with exit code 0, newest checkpoint: step 20: done",
    ]


@pytest.mark.parametrize("code", [0, 2, 3, 130])
def test_some_ends_are_final(tmp_path: Path, code: int):
    returned, _, err = finish(launch("run", "--max-restarts", "5", *job(tmp_path, f"sys.exit({code})")))
    assert returned == code
    assert len(starts(tmp_path)) == 1
    assert lines(err)[-1].endswith("a restart would not change that" if code else "done")


def test_the_end_of_a_time_limit_is_not_called_done(tmp_path: Path):
    """Saved and left with exit code 0, as at `train.exit_duration`: no restart, but more to do."""
    words = job(tmp_path, "save(30)", "train.steps=100")
    returned, _, err = finish(launch("run", "--max-restarts", "5", *words))
    assert (returned, len(starts(tmp_path))) == (0, 1)
    assert lines(err)[-1].endswith(
        "newest checkpoint: step 30: stopped on request before step 100: the same command goes on"
    )


@pytest.mark.parametrize(
    ("consumed", "end"), [(480, "stopped on request before step 43: the same command goes on"), (636, "done")]
)
def test_the_end_of_a_run_counted_in_samples_follows_from_its_record(tmp_path: Path, consumed: int, end: str):
    """640 samples in batches of 12, of which 480, or all that fill a batch, were read by step 30 in others: 13 left."""
    code = (
        f"save('30/record'); open('{tmp_path}/run/checkpoints/30/record/metadata', 'w')"
        f".write('{{\"consumed_samples\": {consumed}}}')"
    )
    _, _, err = finish(launch("run", "--max-restarts", "5", *job(tmp_path, code, "train.samples=640")))
    assert lines(err)[-1].endswith(f"newest checkpoint: step 30: {end}")


def test_restarts_are_limited(tmp_path: Path):
    returned, _, err = finish(launch("run", "--max-restarts", "2", "--backoff", "0", *job(tmp_path, "sys.exit(4)")))
    assert returned == 4
    assert len(starts(tmp_path)) == 3
    assert lines(err)[-1] == "ended with exit code 4 (hung), no checkpoint: no restart left"


def test_it_goes_on_with_fewer_processes(tmp_path: Path):
    """Batches of 12 over 4 x 1 devices with fsdp 2: 3 and 1 processes have an odd number, 2 are legal.

    The first crash is met with the same number, the second one without a newer checkpoint with fewer, the third one
    after progress with the same.
    """
    code = "time.sleep(0.3)\nif rank: sys.exit(0)\nif starts == 3: save(10)\nsys.exit(0 if starts == 4 else 1)"
    options = ["--processes", "4", "--min-processes", "1", "--devices", "1", "--backoff", "0"]
    returned, _, err = finish(launch("run", "--max-restarts", "5", *options, *job(tmp_path, code)))
    assert returned == 0, err
    assert starts(tmp_path) == [4, 4, 2, 2]
    assert "no progress since the last start: going on with 2 instead of 4 processes" in lines(err)


def test_another_launcher_is_told_how_many(tmp_path: Path):
    """As in `srun --nodes={processes}`: one process is started here, and knows nothing of the others."""
    code = f"open('{tmp_path}/told', 'a').write(sys.argv[1] + '\\n'); sys.exit(1)"
    before, config = job(tmp_path, code)[:4], job(tmp_path, code)[4:]
    options = ["--processes", "4", "--min-processes", "2", "--devices", "1", "--backoff", "0", "--max-restarts", "2"]
    assert finish(launch("run", *options, *before, "nodes={processes}", *config))[0] == 1
    assert (tmp_path / "told").read_text().split() == ["nodes=4", "nodes=4", "nodes=2"]
    assert starts(tmp_path) == [1, 1, 1]


def test_legal_numbers_of_processes():
    """One GPU each, fsdp 2: even numbers; 12 samples a step: not 8, the others divide it."""
    run = Run.of(["python", "-m", *CONFIG], processes=8, devices=1)
    assert [number for number in range(1, 9) if run.allows(number)] == [2, 4, 6]
    assert (run.fewer(8, 1), run.fewer(6, 1), run.fewer(4, 3)) == (6, 4, None)


def test_the_architecture_of_the_model_that_it_begins_from(tmp_path: Path):
    """As training reads it: 2048 positions, and not the 1024 of the defaults, allow such a sequence."""
    model = made(tmp_path / "model", "llama", replace(MODELS["llama"], max_positions=2048))
    words = [f"init_from={model}", "data.seq_length=2048", "train.steps=1", f"output_dir={tmp_path}/run"]
    run = Run.of(["python", "-m", "megajax.train", *words], processes=2, devices=1)
    assert run.config is not None
    assert (run.config.model.num_layers, run.config.model.max_positions) == (2, 2048)


def test_the_supervisor_does_without_jax():
    """Which would take a second of every start, and memory for as long as the job runs."""
    code = f"import sys; from launch.run import Run; Run.of({CONFIG}, 4, 1); sys.exit('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 0


def test_fewer_processes_take_fewer_gpus(tmp_path: Path):
    """Each keeps as many as it had, so that the number of devices is the one that was found legal."""
    code = f"open('{tmp_path}/gpus', 'a').write(os.environ['CUDA_VISIBLE_DEVICES'] + ' '); sys.exit(rank == 0)"
    options = ["--processes", "4", "--min-processes", "1", "--backoff", "0", "--max-restarts", "2"]
    finish(launch("run", *options, *job(tmp_path, code), CUDA_VISIBLE_DEVICES="4,5,6,7"))
    assert (tmp_path / "gpus").read_text().split()[-2:] == ["4,5", "4,5"]


def test_min_processes_needs_to_know_the_run():
    returned, _, err = finish(launch("run", "--max-restarts", "1", "--min-processes", "1", *python("pass")))
    assert (returned, err.count("\n")) == (2, 1)
    assert "--min-processes needs a command with megajax.train" in err


def test_a_bad_configuration_is_found_before_anything_starts(tmp_path: Path):
    returned, _, err = finish(launch("run", "--max-restarts", "1", *job(tmp_path, "pass", "optim.lrr=1")))
    assert (returned, err.count("\n")) == (2, 1)
    assert "unknown key `optim.lrr`" in err
    assert not (tmp_path / "starts").exists()


def test_sigterm_is_forwarded_and_ends_it(tmp_path: Path):
    """Also when what it stops does not call that a success."""
    code = (
        "signal.signal(signal.SIGTERM, lambda *_: (save(7), sys.exit(1)))\n"
        f"open('{tmp_path}/ready', 'w').close()\ntime.sleep(60)"
    )
    process = launch("run", "--max-restarts", "5", *job(tmp_path, code))
    until((tmp_path / "ready").exists)
    process.send_signal(signal.SIGTERM)
    returned, _, err = finish(process)
    assert returned == 1
    assert lines(err)[-1] == "ended with exit code 1 (an error), newest checkpoint: step 7: SIGTERM was received"


def test_sigterm_between_two_starts_ends_it(tmp_path: Path):
    process = launch("run", "--max-restarts", "5", "--backoff", "60", *job(tmp_path, "sys.exit(1)"))
    assert process.stderr is not None
    while "restart in 60 s" not in process.stderr.readline():
        pass
    before = time.monotonic()
    os.kill(process.pid, signal.SIGTERM)
    returned, _, err = finish(process)
    assert (returned, lines(err)) == (1, ["SIGTERM was received: no restart"])
    assert time.monotonic() - before < 10


@pytest.mark.slow
def test_a_real_run_goes_on_after_a_lost_process(tmp_path: Path):
    """Two processes train; one of them is killed; two new ones go on from its checkpoint to the end."""
    words = tiny_run(tmp_path, "train.steps=80", "checkpoint.every=20")
    command = ["--", sys.executable, "-m", "megajax.train", *words]
    options = ["--processes", "2", "--devices", "1", "--max-restarts", "1", "--backoff", "0"]
    process = launch("run", *options, *command)
    until(lambda: process.poll() is not None or (tmp_path / "run/checkpoints/20").exists(), 100)
    _, child = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    os.kill(int(child), signal.SIGKILL)
    returned, out, err = finish(process)
    assert returned == 0, err
    first, second = (line for line in lines(err) if line.startswith("start "))
    assert first.endswith("2 process(es), no checkpoint")
    assert re.search(r"2 process\(es\), newest checkpoint: step [246]0$", second)
    assert re.search("resumed at step [246]0 of 80", out)
    assert out.count("finished 80 steps") == 1
    assert "mesh: data 2" in out
