"""`python -m megajax` lists the commands that can be run."""

from __future__ import annotations

import importlib

import pytest

from megajax.__main__ import list_commands, main


def test_every_module_that_can_be_started_is_listed(capsys):
    assert main([]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "  python -m megajax.train      train a model" in lines
    assert "  python -m launch.local       a multi-process job on this machine" in lines
    assert any(line.split()[:3] == ["llama3_8b", "Llama", "3"] for line in lines)
    assert all(len(line) < 120 for line in lines if line.startswith("  "))


def test_the_list_is_complete():
    from tests.test_repository import ROOT

    runnable = {
        f"{path.parent.name}.{path.stem}"
        for folder in ("megajax", "launch")
        for path in (ROOT / folder).glob("*.py")
        if 'if __name__ == "__main__"' in path.read_text(encoding="utf-8") and path.stem != "__main__"
    }
    assert list_commands().keys() == runnable
    assert all(callable(importlib.import_module(name).main) for name in runnable)


@pytest.mark.parametrize(
    ("word", "hint"),
    [("train", "run `python -m megajax.train`"), ("quickstart", "it lists the commands and takes no words")],
)
def test_a_word_behind_it_is_answered(capsys, word, hint):
    assert main([word]) == 2
    assert capsys.readouterr().err == f"megajax: error: python -m megajax {word}: {hint}\n"
