"""Jobs of two and four processes give the numbers of one, checkpoints for any number, and requests and faults to all.

The processes are real, started by `launch.local`, and talk over gloo.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from megajax.train import main
from tests.runs import ALL_DEVICES, WORDS, finish, records, start_job

pytestmark = pytest.mark.slow

AT_STEP = "from megajax.train import Trainer\ntake_step = Trainer.take_step\n"
"""Python that runs in every process before training; what it makes of `take_step` happens at that step."""
PIPELINE = ["parallel.pipe=2", "parallel.data=2", "parallel.fsdp=1", "parallel.tensor=2", "train.micro_batch_size=2"]
SHARDS = ["parallel.data=1", "parallel.fsdp=4", "parallel.tensor=2", "train.micro_batch_size=2"]


def at_step(step: int, rank: int, action: str) -> str:
    """Have a process do something instead of taking a step."""
    return (
        f"{AT_STEP}def take(self, consumed, batch):\n"
        f"    if rank == {rank} and self.step == {step - 1}:\n        {action}\n"
        "    return take_step(self, consumed, batch)\nTrainer.take_step = take"
    )


def losses(output: Path) -> list[Any]:
    return [line["lm loss"] for line in records(output) if "lm loss" in line]


@pytest.fixture(scope="module")
def one(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    """Losses of twenty steps in this process, data 2 x fsdp 2 x tensor 2."""
    output = tmp_path_factory.mktemp("one") / "run"
    assert main([*WORDS, *ALL_DEVICES, f"data.text={corpus}", f"output_dir={output}"]) == 0
    return losses(output)


@pytest.fixture(scope="module")
def four(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A run of four processes of two devices, stopped by a signal to one of them, and what it printed.

    A stage is two processes, tensor is within one.
    """
    output = tmp_path_factory.mktemp("four") / "run"
    signal = at_step(9, 2, "import signal; os.kill(os.getpid(), signal.SIGTERM)")
    code, out, err = finish(start_job(corpus, output, *PIPELINE, processes=4, devices=2, before=signal))
    assert code == 0, err
    return output, out


def test_all_processes_stop_after_the_same_step(four: tuple[Path, str], one: list[Any]) -> None:
    """One got the signal in step 9; the news travels with the next step. Only process 0 talks."""
    output, out = four
    assert "[0] SIGTERM: step 10 of 20 is saved; the same command resumes" in out
    assert "[0] saved step 10" in out
    assert not any(f"[{rank}] saved" in out or f"[{rank}]       mesh" in out for rank in (1, 2, 3))
    assert losses(output) == pytest.approx(one[:10], rel=1e-6)


def test_two_processes_go_on_where_four_stopped(
    corpus: Path, four: tuple[Path, str], one: list[Any], tmp_path: Path
) -> None:
    """On another layout. What is restored is compared, bit by bit, with fingerprints of what was saved."""
    output = tmp_path / "run"
    shutil.copytree(four[0], output)
    code, out, err = finish(start_job(corpus, output, *SHARDS, processes=2, devices=4))
    assert code == 0, err
    assert "resumed at step 10 of 20" in out
    assert losses(output) == pytest.approx(one, rel=1e-5)


def test_one_process_goes_on_where_four_stopped(
    corpus: Path, four: tuple[Path, str], one: list[Any], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "run"
    shutil.copytree(four[0], output)
    assert main([*WORDS, *ALL_DEVICES, f"data.text={corpus}", f"output_dir={output}"]) == 0
    assert "resumed at step 10 of 20" in capfd.readouterr().out
    assert losses(output) == pytest.approx(one, rel=1e-5)


@pytest.mark.parametrize(
    ("action", "said"),
    [("raise ValueError('row 17 has no text')", "ValueError: row 17 has no text"), ("os._exit(9)", "without a word")],
    ids=["raises", "exits"],
)
def test_a_process_that_fails_takes_the_job_down(corpus: Path, tmp_path: Path, action: str, said: str) -> None:
    """Both are gone soon, and the log of each begins its end with what happened to the one."""
    words = ["parallel.fsdp=1", "parallel.tensor=2", "parallel.data=1"]
    job = start_job(corpus, tmp_path / "run", *words, processes=2, devices=1, before=at_step(3, 1, action))
    code, _, err = finish(job)
    assert code != 0
    first = next(line for line in err.splitlines() if line.startswith("[0] megajax: "))
    assert "process 1 (" in first
    assert said in first


def test_two_processes_go_back_from_a_bad_step(corpus: Path, tmp_path: Path) -> None:
    """The batch of one of them is spoiled; both return to the copies that each has of step 12."""
    spoil = at_step(15, 1, "batch['loss_mask'][0, 0] = float('nan')")
    words = ["parallel.data=2", "parallel.fsdp=1", "parallel.tensor=1", "train.micro_batch_size=4"]
    copies = ["health.policy=rollback", f"checkpoint.local={tmp_path / 'local'}", "checkpoint.local_every=3"]
    code, _, err = finish(start_job(corpus, tmp_path / "run", *words, *copies, processes=2, devices=1, before=spoil))
    assert code == 0, err
    assert "the loss is nan at step 15" in err
    assert "back to the weights of step 12, going on behind step 15" in err
    assert [line["step"] for line in records(tmp_path / "run") if "lm loss" in line] == [*range(1, 13), *range(16, 21)]


def test_a_disk_that_is_full_for_one_of_them(corpus: Path, tmp_path: Path) -> None:
    """Its save fails in the background, where the other one would wait for it."""
    limit = at_step(5, 1, "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (100, -1))")
    words = ["parallel.data=2", "parallel.fsdp=1", "parallel.tensor=1", "train.micro_batch_size=4"]
    job = start_job(corpus, tmp_path / "run", *words, "checkpoint.every=3", processes=2, devices=1, before=limit)
    code, _, err = finish(job, seconds=100)
    assert code == 2
    assert "saving a checkpoint to" in next(line for line in err.splitlines() if line.startswith("[0] megajax: "))
