"""The repository describes itself truly: links and paths exist, sizes stay small, versions agree."""

import ast
import re
import subprocess
import sys
import tomllib
from itertools import chain
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[1]
DOCUMENTS = sorted(
    path for folder in (ROOT, ROOT / "docs", ROOT / "launch", ROOT / "configs/data") for path in folder.glob("*.md")
)
PACKAGE = sorted(path for folder in ("megajax", "launch") for path in (ROOT / folder).rglob("*.py"))
CODE = [*PACKAGE, *sorted(path for folder in ("tests", "bench") for path in (ROOT / folder).rglob("*.py"))]
FOLDERS = ("megajax", "configs", "tests", "launch", ".ci", "notebooks", "docs", "bench")


def name(path: Path) -> str:
    return str(path.relative_to(ROOT))


def mentioned_paths(text: str) -> set[str]:
    """Targets of links, and words that look like a file of this repository."""
    links = re.findall(r"\]\(([^)#]+)[^)]*\)", text)
    words = re.findall(rf"(?<![\w./-])(?:{'|'.join(map(re.escape, FOLDERS))})/[\w./-]+", text)
    return {link for link in links if "://" not in link} | {word.rstrip(".") for word in words}


@pytest.mark.parametrize("document", DOCUMENTS, ids=name)
def test_paths_in_documents_exist(document):
    missing = {
        path
        for path in mentioned_paths(document.read_text(encoding="utf-8"))
        if not ((ROOT / path).exists() or (document.parent / path).exists())
    }
    assert not missing


def test_commands_in_the_readme_exist():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    modules = set(re.findall(r"python -m ((?:megajax|launch)\.\w+)", text))
    assert "megajax.train" in modules
    assert {module for module in modules if not (ROOT / f"{module.replace('.', '/')}.py").is_file()} == set()
    extras = set(chain.from_iterable(found.split(",") for found in re.findall(r"\.\[([\w,]+)\]", text)))
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert extras <= project["optional-dependencies"].keys()


def test_continuous_integration_runs_the_tests_as_the_readme_says():
    assert "&& pytest\n" in (ROOT / "README.md").read_text(encoding="utf-8")
    assert re.search(r"in_venv oldest pytest$", (ROOT / ".ci/run").read_text(encoding="utf-8"), re.MULTILINE)


def test_the_changelog_knows_the_version():
    version = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["version"]
    released = re.findall(r"^## \[(\d[^\]]*)\]", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert released[0] == version


@pytest.mark.parametrize("path", PACKAGE, ids=name)
def test_every_module_says_what_it_is_for(path):
    assert ast.get_docstring(ast.parse(path.read_text(encoding="utf-8")))


@pytest.mark.parametrize("path", CODE, ids=name)
def test_files_and_functions_stay_small(path):
    text = path.read_text(encoding="utf-8")
    assert text.count("\n") <= 400
    functions = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    assert {node.name for node in functions if node.end_lineno - node.lineno >= 80} == set()


def test_hooks_need_no_network():
    repositories = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text(encoding="utf-8"))["repos"]
    hooks = [hook for repository in repositories for hook in repository["hooks"]]
    assert {repository["repo"] for repository in repositories} == {"local"}
    assert {hook["language"] for hook in hooks} == {"system"}


@pytest.mark.slow
def test_tests_are_skipped_by_what_each_needs():
    """Without PyTorch and transformers, those against them: no module fails to be read, and the others pass."""
    without = "import sys, pytest; sys.modules.update(torch=None, transformers=None)"
    code = (
        f"{without}; sys.exit(pytest.main(['-n', '0', '-q', '-rs', 'tests/interop', '--ignore', 'tests/interop/hf']))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"\d+ passed, \d+ skipped", done.stdout)
    for needed in ("torch", "transformers", "torch, transformers"):
        assert f"not installed: {needed} (pip install" in done.stdout
